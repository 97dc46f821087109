"""Checkpoints: written beside training, whole or not at all, loaded into any layout, without running code from them.

checkpointer     the face: `Checkpointer`, `save`, `load`
named_tensors    a pipeline and its optimizer as named tensors; plain values as in `messages.plain`, never pickled
save/            what is collected, who writes what, and one save from the copy to the rename
load/            which checkpoint is whole, its tensors for any layout, and where they go
disk/            manifest, files and lock (no torch but in `tensors`)
export           safetensors for other programs;  difference: two checkpoints compared
"""
