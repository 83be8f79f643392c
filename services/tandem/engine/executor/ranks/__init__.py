"""Tensor parallelism: several processes compute each step of one engine together.

Each process is a rank. Rank 0 is the engine process: it schedules and samples. The other ranks only
compute. A rank stores its share of the weights.

    kernels          exchange of activations                        KV pool
    native           buffers that all ranks map (native/team.h)     one, which all ranks map
    others, CPU      shared_memory.py                               one, which all ranks map
    others, GPUs     nccl.py                                        one for each rank, with the KV
                                                                    heads of the rank
    others, one GPU  shared_memory.py                               as with several GPUs

With native kernels, and with invariant numerics on CPUs, an output is summed by one thread in one
order, so the tokens are equal, bit for bit, for every number of ranks.
"""
