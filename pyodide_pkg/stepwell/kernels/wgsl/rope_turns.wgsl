// The rotation of the step's position for each pair of a head: cos, sin of position * frequency. One thread per pair.
//
// sin and cos of large angles are not accurate enough in WGSL, so the rotation of a position is the product of the
// rotations of its binary digits, which the host computed in double precision (see rope_append.wgsl, for the tables too).
{% include "step.wgsl" %}
@group(0) @binding(1) var<storage, read> digits: array<vec2f>;        // [table][bit][pair]: cos, sin of 2^bit * frequency
@group(0) @binding(2) var<storage, read_write> turns: array<vec2f>;  // [pair]

const PAIRS = {{ rope_dim // 2 }}u;

@compute @workgroup_size({{ threads }})
fn main(@builtin(global_invocation_id) id: vec3u) {
  if (id.x >= PAIRS) { return; }
{% if long_from %}
  let table = select(0u, {{ bits }}u * PAIRS, step.length >= {{ long_from }}u);
{% else %}
  const table = 0u;
{% endif %}
  var turn = vec2f({{ rope_scale }}, 0.0);
{% for bit in range(bits | int) %}
  {
    let digit = select(vec2f(1.0, 0.0), digits[table + {{ bit }}u * PAIRS + id.x], ((step.position >> {{ bit }}u) & 1u) != 0u);
    turn = vec2f(turn.x * digit.x - turn.y * digit.y, turn.x * digit.y + turn.y * digit.x);
  }
{% endfor %}
  turns[id.x] = turn;
}
