// y[row] = x[row] / sqrt(mean(x[row]^2) + eps) * weight.   One workgroup per row.
// With `last` only the step's last row is normalised, into row 0 of y (the lm_head needs no other).
// With `subgroups` the workgroup is one subgroup's four lanes.
{% if subgroups %}
enable subgroups;
{% endif %}
{% include "step.wgsl" %}
@group(0) @binding(1) var<storage, read> x: array<vec4f>;
@group(0) @binding(2) var<storage, read> weight: array<vec4f, {{ width // 4 }}>;
@group(0) @binding(3) var<storage, read_write> y: array<vec4f>;

const WIDTH = {{ width // 4 }}u;  // in vec4
const THREADS = {{ threads }}u;
{% if not subgroups %}
var<workgroup> partial: array<f32, THREADS>;

fn sum_of_all(value: f32, thread: u32) -> f32 {
  partial[thread] = value;
  workgroupBarrier();
  for (var half = THREADS / 2u; half > 0u; half /= 2u) {
    if (thread < half) { partial[thread] += partial[thread + half]; }
    workgroupBarrier();
  }
  return partial[0];
}
{% endif %}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
{% if last %}
  let source = (step.rows - 1u) * WIDTH;
  let place = 0u;
{% else %}
  let source = group.x * WIDTH;
  let place = source;
{% endif %}
  var squares = vec4f(0.0);
  for (var i = thread; i < WIDTH; i += THREADS) {
    let value = x[source + i];
    squares += value * value;
  }
  let own = dot(squares, vec4f(1.0));
  let all = {{ "subgroupAdd(own)" if subgroups else "sum_of_all(own, thread)" }};
  let scale = inverseSqrt(all / f32(WIDTH * 4u) + {{ eps }});
  for (var i = thread; i < WIDTH; i += THREADS) {
    y[place + i] = x[source + i] * scale * weight[i];
  }
}
