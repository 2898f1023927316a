// The launches of decode/kv_pattern.py: they compute nothing of use, but write and read every buffer of the growing-KV
// pattern, in integers whose result the host can foretell.
//   seed    x[i] = position + i
//   mix     y[i] = x[i mod width of x] * MUL + ADD: one intermediate out of the one before
//   append  this step's rows of one K or V tensor: word w of position p is p * ROW + salt + w; one workgroup per row
//   sum     slot.sum = the sum of one word of every position up to `length`, wherever that was written
{% include "step.wgsl" %}
const THREADS = {{ threads }}u;
{% if mode in ("append", "sum") %}
struct Slot {
  salt: u32,          // tells this tensor from the others
  sum: atomic<u32>,
}
const ROW = {{ row_factor }}u;
const WIDTH = {{ words }}u;  // 32-bit words of a position
@group(0) @binding(2) var<storage, read_write> slot: Slot;
{% endif %}
{% if mode == "append" %}
@group(0) @binding(1) var<storage, read_write> tensor: array<vec4u>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
  if (group.x == 0u && thread == 0u) { atomicStore(&slot.sum, 0u); }
  let position = step.position + group.x;
  let first = vec4u(position * ROW + slot.salt) + vec4u(0u, 1u, 2u, 3u);
  for (var i = thread; i < WIDTH / 4u; i += THREADS) {
    tensor[position * (WIDTH / 4u) + i] = first + vec4u(4u * i);
  }
}
{% elif mode == "sum" %}
@group(0) @binding(1) var<storage, read> tensor: array<u32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
  var sum = 0u;
  let first = group.x * THREADS * {{ per }}u + thread;
  for (var k = 0u; k < {{ per }}u; k++) {
    let position = first + k * THREADS;
    if (position < step.length) { sum += tensor[position * WIDTH + (position * {{ stride }}u) % WIDTH]; }
  }
  atomicAdd(&slot.sum, sum);
}
{% else %}
{% if mode == "mix" %}
@group(0) @binding(1) var<storage, read> x: array<u32>;
@group(0) @binding(2) var<storage, read_write> y: array<u32>;
{% else %}
@group(0) @binding(1) var<storage, read_write> y: array<u32>;
{% endif %}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
  let first = group.x * THREADS * {{ per }}u + thread;
  for (var k = 0u; k < {{ per }}u; k++) {
    let i = first + k * THREADS;
    if (i >= {{ words }}u) { return; }
{% if mode == "mix" %}
    y[i] = x[i % {{ x_words }}u] * {{ mul }}u + {{ add }}u;
{% else %}
    y[i] = step.position + i;
{% endif %}
  }
}
{% endif %}
