"""Checkpoints: written beside training, whole or not at all, loaded into any layout, without running code from them.

checkpointer     the face: `Checkpointer`; `save` and `load` are in `single`
named_tensors    what one process saves; plain values as in `messages.plain`, never pickled
save/            who writes what, and one save from the copy to the rename
load/            which checkpoint is whole, its tensors for any layout, and where they go
disk/            manifest, folder and lock
files/           safetensors on disk, and other libraries' folders;  processes: what they tell each other;  generators
export           safetensors for other programs;  difference: two checkpoints compared
"""
