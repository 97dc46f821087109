"""What a stage keeps besides its parameters, and whose memory that is.

phase                   what a thread is computing now, for layers that need to know
ownership               memory that two could hold while one of them writes: what is handed over, and when as a copy
memory_layout           how a tensor lies in memory, and copies that lie the same way
hidden_tensors          tensors inside of objects that torch does not know as containers

transaction             undoes a step that failed, by three kinds of snapshots:
    attribute_snapshots     the plain attributes of modules
    tensor_snapshots        the contents of buffers, and of tensors in attributes
    parameters              gradients, and hooks that wait for complete ones
recomputation           the state that a forward sees when it runs a second time

randomness              random numbers that depend on what is computed, not on when or where
dual_levels             forward-mode differentiation, which takes turns as random numbers do
batch_norm              running statistics, or the norm itself, over whole batches
replica_batch_norm      and over the batches of all replicas
"""
