// The cases of native_linear_cases.cc with kernels that keep rows in float32.
#define QUIRE_FLOAT_ROWS
#include "native_linear_cases.cc"
