"""The pool under somebody else's WebGPU runtime: shims in JavaScript (``js/``), decisions by the pool's policies."""
