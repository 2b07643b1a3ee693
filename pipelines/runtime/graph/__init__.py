"""The graph executor: trains plans inside OneFlow's ``nn.Graph``, with global tensors.

=============  ===================================================================================================
module         contents
=============  ===================================================================================================
`meshes`       meshes of layers, changes between them, and what the executor refuses; needs no OneFlow
`layers`       modules and statements of each kind of layer; needs no OneFlow
`modules`      the modules; exported files contain them
`model`        `GlobalModel`, which executes the statements
`kept`         `KeptGraph`, an ``nn.Graph`` that lives as long as its process
`executor`     `GraphExecutor`, which trains it
=============  ===================================================================================================
"""
