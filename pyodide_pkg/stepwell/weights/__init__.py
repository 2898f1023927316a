"""A model's weights: read from a GGUF file, or made at random, and laid out in GPU memory for the kernels.

``gguf.py`` reads and checks a file's header (``read_gguf(source) -> GgufFile``: metadata and tensors), ``formats.py``
is the table of tensor formats.  ``loader.py`` streams the tensors to the GPU and repacks them there: the eleven formats
of files fit exactly into the layouts of ``kernels/layouts.py``.  ``synthetic.py`` makes random weights on the GPU for a
shape alone.
"""
