// sums[i] = the sum, modulo 2^32, of the 4 * LOADS words that thread i reads: what the adapter's memory can deliver when
// nothing else is wanted of it. Each workgroup reads THREADS * LOADS vectors that lie together, in LOADS loads per thread
// that do not wait for each other. Without loads it is the least that a launch can do.
const THREADS = {{ threads }}u;
{% if loads > 0 %}
@group(0) @binding(0) var<storage, read_write> sums: array<u32>;
@group(0) @binding(1) var<storage, read> words: array<vec4u>;
{% else %}
@group(0) @binding(0) var<storage, read_write> sums: array<u32>;
{% endif %}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
  var sum = vec4u(0u);
{% if loads > 0 %}
  let first = group.x * THREADS * {{ loads }}u + thread;
{% for i in range(loads) %}
  sum += words[first + {{ i }}u * THREADS];
{% endfor %}
{% endif %}
  sums[group.x * THREADS + thread] = sum.x + sum.y + sum.z + sum.w;
}
