// out[row][head] = softmax over positions <= the row's own of (q . k / sqrt(head_dim)), times v.   Online softmax.
// One workgroup per (head, row): each thread walks every THREADS-th position, then the partial results are merged.
{% include "step.wgsl" %}
@group(0) @binding(1) var<storage, read> qkv: array<vec4f>;      // [row][(heads + 2 kv_heads) * head_dim]
@group(0) @binding(2) var<storage, read> k_cache: array<vec4f>;  // [position][kv_heads * head_dim]
@group(0) @binding(3) var<storage, read> v_cache: array<vec4f>;
@group(0) @binding(4) var<storage, read_write> out: array<vec4f>;  // [row][heads * head_dim]

const D = {{ head_dim // 4 }}u;  // in vec4
const THREADS = {{ threads }}u;
const ROW = {{ (heads + 2 * kv_heads) * head_dim // 4 }}u;
const KV = {{ kv_heads * head_dim // 4 }}u;
var<workgroup> maxima: array<f32, THREADS>;
var<workgroup> sums: array<f32, THREADS>;
var<workgroup> values: array<array<vec4f, D>, THREADS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
  let head = group.x;
  let row = group.y;
  let q = row * ROW + head * D;
  let kv = head / {{ heads // kv_heads }}u * D;
  let length = step.position + row + 1u;
  var highest = -3.4e38;
  var sum = 0.0;
  var value: array<vec4f, D>;
  for (var p = thread; p < length; p += THREADS) {
    var score = vec4f(0.0);
    for (var i = 0u; i < D; i++) { score += qkv[q + i] * k_cache[p * KV + kv + i]; }
    let s = dot(score, vec4f({{ head_dim ** -0.5 }}));
    let top = max(highest, s);
    let old = exp(highest - top);
    let weight = exp(s - top);
    sum = sum * old + weight;
    for (var i = 0u; i < D; i++) { value[i] = value[i] * old + weight * v_cache[p * KV + kv + i]; }
    highest = top;
  }
  maxima[thread] = highest;
  sums[thread] = sum;
  values[thread] = value;
  workgroupBarrier();
  for (var half = THREADS / 2u; half > 0u; half /= 2u) {
    if (thread < half) {
      let other = thread + half;
      let top = max(maxima[thread], maxima[other]);
      let a = exp(maxima[thread] - top);
      let b = exp(maxima[other] - top);
      sums[thread] = sums[thread] * a + sums[other] * b;
      for (var i = 0u; i < D; i++) { values[thread][i] = values[thread][i] * a + values[other][i] * b; }
      maxima[thread] = top;
    }
    workgroupBarrier();
  }
  for (var i = thread; i < D; i += THREADS) {
    out[(row * {{ heads }}u + head) * D + i] = values[0][i] / sums[0];
  }
}
