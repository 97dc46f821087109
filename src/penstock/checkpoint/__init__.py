"""Checkpoints: written beside training, whole or not at all, loaded into any layout, without running code from them.

::

    manifest    what a checkpoint is on disk, and whether one is whole (no torch)
    values      plain values as JSON, with their tensors set aside: nothing is ever pickled
    state       a pipeline and its optimizer as named tensors, and back
    body        the tensors of one process: a copy, and the file that it becomes
    plan        who writes what (torch.distributed.checkpoint's planner)
    saving      one save, from the copy to the rename
    reading     tensors of a checkpoint into tensors of any layout
    checkpointer    the face: `Checkpointer`, `save`, `load`
    export      safetensors for other programs;  difference: two checkpoints compared
"""
