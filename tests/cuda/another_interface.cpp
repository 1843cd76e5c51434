// Overrides the kernel library's interface number, as if it was built from another version.
#include "cuda/launchers.h"

int pyruntime_interface(void) {
  return PYRUNTIME_INTERFACE + 1;
}
