// token[0] = the id of the largest of `size` logits that is not in `ban`; of equal ones the smallest id.
//
// `stage`  all: one workgroup does it; part: workgroup w leaves the best of its PER logits in pairs[w]; pairs: one
//          workgroup takes the best of those
{% include "step.wgsl" %}
{% if stage == "pairs" %}
@group(0) @binding(1) var<storage, read> pairs: array<vec2u>;        // [part]: logit (its bits), id
{% else %}
@group(0) @binding(1) var<storage, read> logits: array<f32>;
{% endif %}
{% if stage == "part" %}
@group(0) @binding(2) var<storage, read_write> pairs: array<vec2u>;
{% else %}
@group(0) @binding(2) var<storage, read_write> token: array<u32>;
{% endif %}

const SIZE = {{ size }}u;
const PER = {{ (size + parts - 1) // parts }}u;
const THREADS = {{ threads }}u;
var<workgroup> best_value: array<f32, THREADS>;
var<workgroup> best_index: array<u32, THREADS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
  var value = -0x1.fffffep+127;  // the lowest f32
  var index = SIZE;              // none yet
{% if stage == "pairs" %}
  for (var i = thread; i < {{ parts }}u; i += THREADS) {
    let candidate = bitcast<f32>(pairs[i].x);
    let id = pairs[i].y;
    if (((candidate > value) | (index == SIZE)) & (id != SIZE)) {
      value = candidate;
      index = id;
    }
  }
{% else %}
  let end = min((group.x + 1u) * PER, SIZE);
  for (var i = group.x * PER + thread; i < end; i += THREADS) {
    let candidate = logits[i];
    // & and |, not && and ||: compilers of CPU adapters take exponential time over a chain of branches
    if (((candidate > value) | (index == SIZE)){% for id in ban %} & (i != {{ id }}u){% endfor %}) {
      value = candidate;
      index = i;
    }
  }
{% endif %}
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
{% if stage == "part" %}
  if (thread == 0u) { pairs[group.x] = vec2u(bitcast<u32>(best_value[0]), best_index[0]); }
{% else %}
  if (thread == 0u) { token[0] = best_index[0]; }
{% endif %}
}
