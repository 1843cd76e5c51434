#include "layers.h"

namespace pyruntime {

void register_layer_ops(torch::Library& m) {
  layers::register_rms_norm(m);
  layers::register_swiglu(m);
  layers::register_rope(m);
  layers::register_attention(m);
  layers::register_attention_block(m);
  layers::register_cross_entropy(m);
  layers::register_adamw(m);
  layers::register_sum_of_squares(m);
  layers::register_add(m);
}

}  // namespace pyruntime
