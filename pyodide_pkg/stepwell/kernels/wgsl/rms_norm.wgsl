// y[row] = x[row] / sqrt(mean(x[row]^2) + eps) * weight.   One workgroup per row.
// With `last` only the step's last row is normalised, into row 0 of y (the lm_head needs no other).
{% include "step.wgsl" %}
@group(0) @binding(1) var<storage, read> x: array<vec4f>;
@group(0) @binding(2) var<storage, read> weight: array<vec4f>;
@group(0) @binding(3) var<storage, read_write> y: array<vec4f>;

const WIDTH = {{ width // 4 }}u;  // in vec4
const THREADS = {{ threads }}u;
var<workgroup> partial: array<f32, THREADS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
{% if last %}
  let source = (step.rows - 1u) * WIDTH;
  let target_ = 0u;
{% else %}
  let source = group.x * WIDTH;
  let target_ = source;
{% endif %}
  var sum = vec4f(0.0);
  for (var i = thread; i < WIDTH; i += THREADS) {
    let value = x[source + i];
    sum += value * value;
  }
  partial[thread] = dot(sum, vec4f(1.0));
  workgroupBarrier();
  for (var half = THREADS / 2u; half > 0u; half /= 2u) {
    if (thread < half) { partial[thread] += partial[thread + half]; }
    workgroupBarrier();
  }
  let scale = inverseSqrt(partial[0] / f32(WIDTH * 4u) + {{ eps }});
  for (var i = thread; i < WIDTH; i += THREADS) {
    y[target_ + i] = x[source + i] * scale * weight[i];
  }
}
