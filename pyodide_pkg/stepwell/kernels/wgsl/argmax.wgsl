// token[0] = the id of the largest of `size` logits that is not in `ban`; of equal ones the smallest id. One workgroup.
{% include "step.wgsl" %}
@group(0) @binding(1) var<storage, read> logits: array<f32>;
@group(0) @binding(2) var<storage, read_write> token: array<u32>;

const SIZE = {{ size }}u;
const THREADS = {{ threads }}u;
var<workgroup> best_value: array<f32, THREADS>;
var<workgroup> best_index: array<u32, THREADS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
  var value = -0x1.fffffep+127;  // the lowest f32
  var index = SIZE;              // none yet
  for (var i = thread; i < SIZE; i += THREADS) {
    let candidate = logits[i];
    // & and |, not && and ||: compilers of CPU adapters take exponential time over a chain of branches
    if (((candidate > value) | (index == SIZE)){% for id in ban %} & (i != {{ id }}u){% endfor %}) {
      value = candidate;
      index = i;
    }
  }
  best_value[thread] = value;
  best_index[thread] = index;
  workgroupBarrier();
  for (var half = THREADS / 2u; half > 0u; half /= 2u) {
    if (thread < half) {
      let other = best_value[thread + half];
      let other_index = best_index[thread + half];
      if (other > best_value[thread] || (other == best_value[thread] && other_index < best_index[thread])) {
        best_value[thread] = other;
        best_index[thread] = other_index;
      }
    }
    workgroupBarrier();
  }
  if (thread == 0u) { token[0] = best_index[0]; }
}
