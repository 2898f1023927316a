// Rows of x as f16, eight to a vector: what matmul_tile multiplies with. One workgroup per row.
//
// A row is divided by a power of two that puts its largest value between 4 and 8. That rounds nothing, and nothing that is
// made of the row in f16 can overflow (matmul_tile.wgsl). The powers are behind the rows, in a vector each.
{% include "step.wgsl" %}
@group(0) @binding(1) var<storage, read> x: array<vec4f>;
@group(0) @binding(2) var<storage, read_write> halves: array<vec4u>;

const OCTETS = {{ k // 8 }}u;  // of a row
const THREADS = {{ threads }}u;
var<workgroup> top: atomic<u32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
  let first = group.x * OCTETS;
  var largest = vec4f(0.0);
  for (var i = thread; i < OCTETS; i += THREADS) {
    largest = max(largest, max(abs(x[2u * (first + i)]), abs(x[2u * (first + i) + 1u])));
  }
  // numbers that are not negative are in the order of their bits
  atomicMax(&top, bitcast<u32>(max(max(largest.x, largest.y), max(largest.z, largest.w))));
  workgroupBarrier();
  let power = max(bitcast<f32>(atomicLoad(&top) & 0x7f800000u), {{ 2.0 ** -100 }});
  for (var i = thread; i < OCTETS; i += THREADS) {
    let e0 = x[2u * (first + i)] * (4.0 / power);
    let e1 = x[2u * (first + i) + 1u] * (4.0 / power);
    halves[first + i] = vec4u(
      pack2x16float(e0.xy), pack2x16float(e0.zw), pack2x16float(e1.xy), pack2x16float(e1.zw));
  }
  if (thread == 0u) { halves[step.rows * OCTETS + group.x] = vec4u(bitcast<u32>(power / 4.0), 0u, 0u, 0u); }
}
