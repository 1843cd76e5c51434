// Stands before the library of kernels and makes it one that was built from another version.
#include "cuda/launchers.h"

int pyruntime_interface(void) {
  return PYRUNTIME_INTERFACE + 1;
}
