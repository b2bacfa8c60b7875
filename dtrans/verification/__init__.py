"""Verification without tolerance, for `plan.verify()` and `dtrans.verify`.

    field        arithmetic modulo 2**61 - 1, on NumPy arrays
    rationals    floats as the simplest rational numbers that round to them
    field_values floats as elements with shadows
    numpy_rules  primitives of JAX on NumPy arrays
    rules        primitives on floats: exact arithmetic, decisions by shadows, hashes of the rest
    complex_rules     complex numbers and fft
    exact_rules       exact sums of servers with tables
    matrix_rules      systems of equations, decompositions, ragged products
    rank_collectives  collectives of JAX on the values of all ranks
    evaluate     a jaxpr, for all ranks in lock step
    state_placement  where the state of a job keeps each number of the one-device state
    value_log    the values of an evaluation, and the equations that compute them
    step_values  an index of the values of a step, and of partial sums
    meanings     values of a job in terms of the step: copies, pieces, partial sums
    naming       the first wrong value on the way to an output that differs
    check        points, comparison
    outcome      the outcome
    by_hand      `dtrans.verify`: steps that users wrote with `shard_map`
    relations    words for how a wrong value is related to the right one
    repairs      the collective whose change makes outputs right

The traced step of a job comes from `dtrans.run.verified`: what is evaluated is what `job.step`
runs. docs/verify.md says what a report proves.
"""
