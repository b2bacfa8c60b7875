"""Exact check that a distributed program computes the same values as a one-device program.

`plan.verify()` and `dtrans.verify` evaluate two programs for random inputs (points) in a finite
field, where arithmetic has no rounding errors. So no tolerance is needed. If outputs differ at one
point, the programs are different. If outputs are equal at all points, the programs are equal with a
probability close to 1. In this package, *the field* is this finite field, the *job* is the
distributed program, and the *step* is the one-device program. A *rule* evaluates one primitive of
JAX in the field.

    field             arithmetic modulo the prime 2**61 - 1, on NumPy arrays
    rationals         a float as the simplest rational number that rounds to it
    field_values      a float as an element of the field, with an approximation in float64
    numpy_rules       rules of JAX's primitives on NumPy arrays
    rule_values       values of operands and outputs, for all rules
    arithmetic_rules  rules of sums, products and contractions of floats
    movement_rules    rules of equations that move, select or convert elements
    order_rules       rules of comparisons, maxima and sorts
    scatter_rules     rules of scatters and of reductions over windows
    rules             table of all rules on floats; hashes for functions the field lacks
    complex_rules     rules of primitives on complex numbers, and of fft
    exact_rules       rules of `dtrans.ops.exact_sum`
    matrix_rules      rules of linear solves, decompositions and ragged products
    rank_collectives  JAX's collectives on the values of all ranks; split of arrays over a mesh
    evaluate          evaluation of a jaxpr in the field, for all ranks at once
    state_placement   position of each number of the one-device state in the state of a job
    value_log         log of all values of an evaluation, with their equations
    step_values       index of the values of a step, and of their partial sums
    meanings          finds a job's value in the step: as a copy, a piece or a partial sum
    naming            search for the first wrong value on the way to an output that differs
    random_points     random inputs (points) at which both programs are evaluated
    check             comparison of a job's step with the one-device step
    outcome           report of a verification
    user_shard_map    `dtrans.verify`, for steps that users wrote with `shard_map`
    relations         text that compares a wrong value with the right value
    repairs           search for the collective at fault, by trial changes of collectives

`dtrans.run.verified` traces the step of a job as `job.step` runs it. docs/verify.md explains what a
report proves.
"""
