"""Verification without tolerance, for `plan.verify()` and `dtrans.verify`.

    field             arithmetic modulo 2**61 - 1, on NumPy arrays
    rationals         floats as the simplest rational numbers that round to them
    field_values      floats as elements with shadows
    numpy_rules       primitives of JAX on NumPy arrays
    rules             primitives on floats: exact arithmetic, decisions by shadows, hashes
    complex_rules     complex numbers and fft
    exact_rules       exact sums of servers with tables
    matrix_rules      systems of equations, decompositions, ragged products
    rank_collectives  collectives of JAX on the values of all ranks
    mesh_pieces       pieces of arrays on a mesh
    evaluate          evaluation of a jaxpr, for all ranks in lock step
    state_placement   place of each number of the one-device state in the state of a job
    value_log         values of an evaluation, and the equations that compute them
    step_values       index of the values of a step, and of partial sums
    meanings          values of a job in terms of the step: copies, pieces, partial sums
    naming            first wrong value on the way to an output that differs
    random_points     random points of the field, at which a comparison evaluates both steps
    check             comparison of a job's step with the one-device step
    outcome           report of a verification
    by_hand           `dtrans.verify`: steps that users wrote with `shard_map`
    relations         words for the relation of a wrong value to the right one
    repairs           search for the collective whose change makes outputs right

`dtrans.run.verified` traces the step of a job as `job.step` runs it. docs/verify.md says what a
report proves.
"""
