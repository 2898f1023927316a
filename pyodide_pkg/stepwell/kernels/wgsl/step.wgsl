// The scalars that change from step to step; everything else is a constant of the variant.
{% if immediates %}
requires immediate_address_space;
{% endif %}
struct Step {
  position: u32,  // of the step's first row
  rows: u32,      // tokens in this step
  length: u32,    // position + rows
  draw: u32,      // what decides a sampled token (sample.wgsl)
}
{% if immediates %}
var<immediate> step: Step;
{% else %}
@group(0) @binding(0) var<uniform> step: Step;
{% endif %}
