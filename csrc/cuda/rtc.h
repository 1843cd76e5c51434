// Replaces the host's headers under NVRTC, which has none (pyruntime/cuda/nvrtc_tiles.py): the names that
// kernels use. NVRTC knows size_t and memcpy itself.
#pragma once

using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
// As in the host's compilers: a struct must have the same layout on both sides.
using int64_t = long;
using uint64_t = unsigned long;
using uintptr_t = unsigned long;
static_assert(sizeof(int64_t) == 8 && sizeof(uintptr_t) == sizeof(void*));

// NVRTC's front end spells offsetof this way.
#define offsetof(type, field) __INTADDR__(&static_cast<type*>(nullptr)->field)
