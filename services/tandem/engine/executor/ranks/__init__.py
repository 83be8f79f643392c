"""Tensor parallelism on CPUs: several processes compute each step of one engine together.

Each process is a rank. Rank 0 is the engine process: it schedules, samples, and owns the KV pool.
The other ranks only compute. A rank stores its share of the outputs of each weight matrix. All
ranks map the KV pool and the buffers of a step, so that what one rank has computed is an input of
the others (kernels/tandem_kernels/native/team.h). An output is always summed by one thread, in one
order, so the tokens are equal, bit for bit, for every number of ranks.
"""
