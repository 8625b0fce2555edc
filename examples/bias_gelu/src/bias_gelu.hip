// The same kernel for AMD.
#include "bias_gelu.cu"
