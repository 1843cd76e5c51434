/* A tool of NVTX, as profilers are: prints the ranges of every domain. The process that it listens to loads it
   by NVTX_INJECTION64_PATH. The layout is that of nvtx3/nvtxDetail/nvtxTypes.h. */

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum { kCallbacks = 1, kDomainModule = 5, kPush = 4, kPop = 5, kRegisterString = 10, kCreate = 12 };

typedef struct {
  size_t struct_size;
  int (*get_functions)(int module, void**** table, unsigned* size);
} Callbacks;

typedef struct { /* nvtxEventAttributes_t */
  uint16_t version, size;
  uint32_t category;
  int32_t color_type;
  uint32_t color;
  int32_t payload_type, reserved;
  uint64_t payload;
  int32_t message_type;
  const char* message;
} Attributes;

typedef struct {
  char name[64];
} Domain;

static Domain domains[64];
static int count;

static Domain* create(const char* name) {
  Domain* domain = &domains[count++ % 64];
  snprintf(domain->name, sizeof domain->name, "%s", name);
  return domain;
}

static const char* register_string(Domain* domain, const char* text) {
  (void)domain;
  static char kept[64][64];
  static int next;
  char* own = kept[next++ % 64];
  snprintf(own, sizeof kept[0], "%s", text);
  return own;
}

static int push(Domain* domain, const Attributes* attributes) {
  fprintf(stderr, "push %s: %s\n", domain->name, attributes->message);
  return 0;
}

static int pop(Domain* domain) {
  fprintf(stderr, "pop %s\n", domain->name);
  return 0;
}

int InitializeInjectionNvtx2(const void* (*get_table)(uint32_t)) {
  const Callbacks* callbacks = get_table(kCallbacks);
  void*** functions;
  unsigned size;
  if (callbacks == NULL || !callbacks->get_functions(kDomainModule, &functions, &size)) return 0;
  *functions[kPush] = push;
  *functions[kPop] = pop;
  *functions[kRegisterString] = register_string;
  *functions[kCreate] = create;
  return 1;
}
