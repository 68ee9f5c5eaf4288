// The same cases with kernels that leave rows in float32.
#define QUIRE_FLOAT_ROWS
#include "native_linear_cases.cc"
