"""Deliberate faults that the tests must notice: one or two for each important file, and five wrong
batch splits.

    python tests/faults.py                 plant each fault in a copy of the project
    python tests/faults.py rules writer    plant only the faults of these files

For each fault, the script runs tests in the copy with `pytest -x`, and prints the first test that
fails. It runs the test that the fault names first, then today's sample of other tests, then the
tests of the nights (`-m soak`). Each of these runs may take five minutes. The script fails if no
test notices a fault. So it shows if a new layout of the package or of the tests hides a fault.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path


ROOT = Path(__file__).parents[1]
MINUTES = 5


@dataclasses.dataclass(frozen=True)
class Fault:
    """Deliberate fault: a change of one place in one file.

    Attributes:
      file: path in the package.
      old: the right text, which occurs once in the file.
      new: the wrong text.
      tests: test files to run, as paths in the folder `tests`.
      noticed_by: a test in these files that notices the fault, and that runs each day.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    noticed_by: str = ""

    @property
    def name(self) -> str:
        """Name of the file without its suffix, such as `rules`."""
        return Path(self.file).stem

    def planted(self, text: str) -> str:
        """Return the text of a file with the fault."""
        assert text.count(self.old) == 1, (
            f"{self.file} has {self.old!r} {text.count(self.old)} times"
        )
        return text.replace(self.old, self.new)


BATCHES = ("verification/test_random_steps.py", "batch/test_step_zoo.py")
TABLES = ("run/parameter_server/test_table_zoo.py",)

FAULTS = (
    Fault(  # a gather that fills with sevens counts as linear
        "_jax/primitives.py",
        "linear_if=_fills_linearly",
        "linear_if=_always",
        ("test_jax_primitives.py",),
        "test_jax_primitives.py::test_linear",
    ),
    Fault(  # rows that change places count as equal
        "_jax/primitives.py",
        '("rev", _F(moves=(0,), linear_in',
        '("rev", _F(moves=(0,), keeps_order=_always, linear_in',
        ("step/test_frozen.py", "test_jax_primitives.py"),
        "step/test_frozen.py::test_a_leaf_whose_rows_change_places_is_not[flip]",
    ),
    Fault(
        "engine/values.py",
        "self.b.call(times(self.shards.count), term)",
        "self.b.call(times(1), term)",
        ("batch/test_local_scope.py",),
        "batch/test_local_scope.py::"
        "test_the_scope_is_of_each_trainers_rows_and_all_else_of_all[mean-nccl2-2]",
    ),
    Fault(
        "zero/rank_values.py",
        "eqn.primitive is trainer_index_p or any(ins)",
        "any(ins)",
        ("zero/test_rank_values.py",),
        "zero/test_rank_values.py::test_what_a_loop_makes_of_its_rank_differs",
    ),
    Fault(
        "_jax/equation_params.py",
        "operands = [*first, *invars[:of_cond], *first, *invars[of_cond:]]",
        "operands = [*first, *first, *invars]",
        ("ir/test_builder.py",),
        "ir/test_builder.py::test_bodies_take_operands_in_front_of_theirs[1]",
    ),
    Fault(  # a sum that an iteration reads in full is a partial sum in the next iteration
        "engine/loops.py",
        "if is_closed and not isinstance(after, RowAxis):",
        "if False:",
        ("engine/test_split.py",),
        "engine/test_split.py::"
        "test_a_carried_sum_that_a_turn_reads_whole_is_reduced_before_the_loop",
    ),
    Fault(  # the carry equals the input of the first iteration
        "ir/interpret.py",
        "joined[i] = join(start[i], results[j])",
        "pass",
        ("ir/test_interpret.py", "zero/test_rank_values.py"),
        "ir/test_interpret.py::test_inputs_enter_the_outputs_that_are_made_of_them[scan]",
    ),
    Fault(  # zero minus a value counts as the value
        "ir/folding.py",
        'for i in (1,) if name == "sub" else (1, 0):',
        "for i in (1, 0):",
        ("ir/test_folding.py",),
        "ir/test_folding.py::test_values_are_folded[number_by_numpy]",
    ),
    Fault(
        "ir/fingerprint.py",
        "if part == BATCH or (sized and part == LOSS):",
        "if part in (BATCH, LOSS):",
        ("ir/test_fingerprint.py",),
        "ir/test_fingerprint.py::test_roles_may_have_traced_batches_of_other_sizes",
    ),
    Fault(
        "batch/precomputed_micro_steps.py",
        "SHARED if n in self.values.full else sharded_along(0) for n in program.out_names",
        "SHARED for n in program.out_names",
        ("batch/test_micro_steps.py",),
        "batch/test_micro_steps.py::"
        "test_plans_in_micro_steps_compute_the_step[dropout_key_in_opt_state-1-2]",
    ),
    Fault(
        "pipeline_parallel/results.py",
        "jnp.concatenate(parts, axis)",
        "jnp.concatenate(parts)",
        ("pipeline_parallel/test_results.py",),
        "pipeline_parallel/test_results.py::"
        "test_rows_of_a_result_are_joined_along_the_dimension_that_has_them[2-1]",
    ),
    Fault(
        "run/pipeline_parallel/compile_update.py",
        "return slots.array(stage, n)",
        "return slots.array(0, n)",
        ("pipeline_parallel/test_arguments_and_state.py",),
        "pipeline_parallel/test_arguments_and_state.py::"
        "test_an_update_may_read_arguments_of_the_step",
    ),
    Fault(
        "rows/rules.py",
        "reduce=op)",
        'reduce="sum")',
        ("rows/test_analysis.py", "slicing/test_server_update.py"),
        "rows/test_analysis.py::test_reductions_leave_each_leaf_free_and_cross[apply_if_finite]",
    ),
    Fault(
        "rows/flow.py",
        "if any(b.crosses for b in bodies) and not",
        "if False and not",
        ("rows/test_analysis.py", "slicing/test_server_update.py"),
        "rows/test_analysis.py::test_rules[fori_loop_that_reduces]",
    ),
    Fault(
        "rows/writer.py",
        "return Slice(row.axis, self.start * row.width, self.rows * row.width)",
        "return Slice(row.axis, self.start, self.rows)",
        ("slicing/test_server_update.py", "parameter_server/test_optimizer_zoo.py"),
        "slicing/test_server_update.py::test_a_flat_view_of_a_leaf_is_cut_where_its_rows_begin",
    ),
    Fault(
        "slicing/rounds.py",
        "self._shared[v] = level + 1\n            else",
        "self._shared[v] = level\n            else",
        ("slicing/test_server_update.py", "run/parameter_server/test_exchange.py"),
        "slicing/test_server_update.py::test_three_servers_compute_what_whole_arrays_compute[sm3]",
    ),
    Fault(
        "slicing/server_spec.py",
        "idle = set(analysis.state_of[None]) - every.shared_state",
        "idle = set[str]()",
        ("slicing/test_server_update.py",),
        "slicing/test_server_update.py::test_a_full_shape_constant_is_read_twice",
    ),
    Fault(
        "slicing/unit_program.py",
        "min(levels.of.get(",
        "max(levels.of.get(",
        ("slicing/test_server_update.py",),
        "slicing/test_server_update.py::"
        "test_what_rows_are_reduced_to_meets_rows_of_the_same_number",
    ),
    Fault(
        "slicing/server_update.py",
        "joined += b.call(_combined(c.op), *parts)",
        "joined += parts[:1]",
        ("slicing/test_server_update.py", "run/parameter_server/test_exchange.py"),
        "slicing/test_server_update.py::"
        "test_a_server_that_has_two_blocks_of_a_leaf_joins_their_parts_of_a_reduction[lamb]",
    ),
    Fault(
        "slicing/divide_update.py",
        "and not _is_uniform(a, producers)",
        "and False",
        ("run/parameter_server/test_update_parts.py",),
        "run/parameter_server/test_update_parts.py::"
        "test_a_block_is_divided_if_its_rows_are_updated_alone[mask-False]",
    ),
    Fault(
        "slicing/mean.py",
        "* (1 / len(grads))",
        "* (1 / 2)",
        ("run/parameter_server/test_trainer_exit.py", "run/parameter_server/test_mesh.py"),
        "run/parameter_server/test_trainer_exit.py::"
        "test_as_paddle_the_last_gradient_counts_once_more_and_the_divisor_stays",
    ),
    Fault(
        "ops/wire_types.py",
        "_encode_total(wire, x + rounding_error, ",
        "_encode_total(wire, x, ",
        ("ops/test_wire_types.py", "parameter_server/test_compression.py"),
        "ops/test_wire_types.py::"
        "test_with_feedback_the_error_of_a_sum_stays_that_of_one_step[int8]",
    ),
    Fault(
        "ops/wire_types.py",
        "at[indices].set(0)",
        "at[indices].add(0)",
        ("parameter_server/test_compression.py",),
        "parameter_server/test_compression.py::"
        "test_numbers_that_are_not_finite_are_sent_and_not_stored",
    ),
    Fault(
        "parameter_server/compression.py",
        "for xs in states)]",
        "for xs in map(split, state))]",
        ("parameter_server/test_compression.py",),
        "parameter_server/test_compression.py::test_one_trainer_has_rounding_errors_too",
    ),
    Fault(  # each trainer continues with the rounding errors of another trainer
        "checkpoint/rounding_errors.py",
        "for k in trainers]\n            values",
        "for k in reversed(trainers)]\n            values",
        ("run/parameter_server/test_compressed_jobs.py",),
        "run/parameter_server/test_compressed_jobs.py::"
        "test_a_restored_simulated_job_has_the_bits_of_an_uninterrupted_job",
    ),
    Fault(  # a checkpoint has the rounding errors of the step before
        "run/role_jobs/trainer_job.py",
        "self._note_rounding_errors(new)",
        "self._note_rounding_errors(state)",
        ("run/parameter_server/test_compressed_jobs.py",),
        "run/parameter_server/test_compressed_jobs.py::"
        "test_restored_processes_have_the_bits_of_an_uninterrupted_job",
    ),
    Fault(  # a checkpoint is written before the arrays of all trainers have arrived
        "protocol/server/save_requests.py",
        "has_all = inbox is not None and not inbox.missing()",
        "has_all = inbox is not None",
        ("protocol/test_save_requests.py",),
        "protocol/test_save_requests.py::"
        "test_the_write_starts_when_the_arrays_of_all_trainers_have_arrived",
    ),
    Fault(
        "parameter_server/dispatch.py",
        "size = math.ceil(size / width) * width",
        "size = max(1, size // width) * width",
        ("parameter_server/test_dispatch.py", "paddle/test_golden.py"),
        "parameter_server/test_dispatch.py::test_every_row_that_paddle_recorded[slice_variable]",
    ),
    Fault(
        "parameter_server/placement.py",
        "        start += rows\n",
        "        start += max(1, rows - 1)\n",
        ("parameter_server/test_transform.py", "paddle/test_golden.py"),
        "parameter_server/test_transform.py::"
        "test_clipping_works_where_paddle_ended_in_an_error[fc_sgd_clip_value_opt-clip0-0]",
    ),
    Fault(
        "step/halves.py",
        "return UpdateProgram(jaxpr, in_names, tuple(out_names)), used, positions",
        "return UpdateProgram(jaxpr, in_names, tuple(out_names)), used, positions[1:]",
        ("step/test_halves.py", "parameter_server/test_transform.py"),
        "step/test_halves.py::test_roles_are_exact[sgd]",
    ),
    Fault(
        "step/marks.py",
        "return [ct if is_zero(ct) else _seed_p.bind(ct)]",
        "return [ct]",
        ("step/test_marks.py", "zero/test_mixed_precision.py"),
        "zero/test_mixed_precision.py::test_the_mesh_gives_the_numbers_of_one_device_in_float16[3]",
    ),
    Fault(
        "rows/parts.py",
        'first = int(p["start_indices"][axis]) + part.start * stride',
        'first = int(p["start_indices"][axis]) + part.start',
        ("slicing/test_partial_init.py", "parameter_server/test_transform.py"),
        "slicing/test_partial_init.py::test_any_init",
    ),
    Fault(
        "rows/random_bits.py",
        "first = start * strides[axis]",
        "first = start",
        ("slicing/test_partial_init.py", "paddle/test_golden.py"),
        "slicing/test_partial_init.py::"
        "test_a_block_of_an_initialiser_is_the_rows_of_the_whole[normal-float32]",
    ),
    Fault(
        "parameter_server/trainer_program.py",
        "x.gradient(trainer_id, count) for x in blocks",
        "x.gradient(0, count) for x in blocks",
        ("parameter_server/test_transform.py", "paddle/test_golden.py"),
        "parameter_server/test_transform.py::"
        "test_what_a_trainer_sends_is_what_the_servers_wait_for[fc_sgd]",
    ),
    Fault(
        "data_parallel/reducer.py",
        "return {d: math.inf if splits[d] == 1 else total[d] / (splits[d] - 1) for d in dtypes}",
        "return {d: math.inf if splits[d] == 1 else total[d] / splits[d] for d in dtypes}",
        ("data_parallel/test_options.py", "data_parallel/test_transform.py"),
        "data_parallel/test_options.py::test_buckets_by_epls_rule[sizes1-2-groups1]",
    ),
    Fault(
        "data_parallel/merge_rules.py",
        "return [n for n",
        "return [] and [n for n",
        ("data_parallel/test_transform.py",),
        "data_parallel/test_transform.py::"
        "test_batch_statistics_are_the_mean_of_all_trainers[2-simulate]",
    ),
    Fault(  # a loop over layers gathers complete sequences first
        "data_parallel/sequence_axis.py",
        "gathers_in_loops=True",
        "gathers_in_loops=False",
        ("data_parallel/test_sequence_axis.py",),
        "data_parallel/test_sequence_axis.py::test_loops_over_layers_stay_divided",
    ),
    Fault(
        "data_parallel/sequence_axis.py",
        "if length % self.size:",
        "if False:",
        ("data_parallel/test_sequence_axis.py",),
        "data_parallel/test_sequence_axis.py::test_sequences_that_the_devices_do_not_divide",
    ),
    Fault(  # the axis "sequence" divides only state that "data" does not divide
        "zero/choose_slices.py",
        "free = tuple(0 if is_taken(n, dim) else length for",
        "free = tuple(length for",
        ("data_parallel/test_sequence_axis.py",),
        "data_parallel/test_sequence_axis.py::"
        "test_a_device_stores_a_slice_of_state_for_each_pair_of_axes[1]",
    ),
    Fault(
        "engine/layout.py",
        "part = -(-shape[axis] // width // degree) * width",
        "part = (shape[axis] // width // degree + 1) * width",
        ("zero/test_plan.py", "zero/test_transform.py"),
        "zero/test_plan.py::test_stage_1_scatters_behind_the_backward_pass[0]",
    ),
    Fault(
        "zero/all_gather.py",
        "if self.how.prefetch == 0 and self.last_scattered is not None:",
        "if False and self.last_scattered is not None:",
        ("zero/test_plan.py", "zero/test_layer_scan.py", "zero/test_transform.py"),
        "zero/test_layer_scan.py::test_a_gather_behind_a_loop_waits_for_what_the_loop_scattered",
    ),
    Fault(
        "zero/slice_analysis.py",
        "and (picks in self.local or self._row(picks))",
        "and False",
        ("zero/test_loop_shapes.py",),
        "zero/test_loop_shapes.py::test_no_rank_gathers_in_a_branch_that_its_own_rows_choose",
    ),
    Fault(
        "zero/slice_writer.py",
        "self.b.call(times(self.how.degree), piece)[0]",
        "piece",
        ("zero/test_loop_shapes.py",),
        "zero/test_loop_shapes.py::test_plans_compute_the_step[a scan, and sum(p**2) in the loss]",
    ),
    Fault(
        "slicing/mean.py",
        'if len(grads) == 1 or op == "same":',
        "if len(grads) == 1:",
        ("parameter_server/test_told_and_asked.py",),
        "parameter_server/test_told_and_asked.py::test_an_update_may_read_arguments_of_the_step[2]",
    ),
    Fault(
        "zero/reduce_scatter.py",
        "if options.replicas == 1:",
        "if True:",
        ("zero/test_plan.py", "zero/test_transform.py"),
        "zero/test_plan.py::test_collectives_move_what_zero_says[0-1-2-2]",
    ),
    Fault(
        "pipeline_parallel/stage_programs.py",
        "outs += b.call(_added, passing[v], back[v])",
        "outs.append(back[v])",
        ("pipeline_parallel/test_transform.py", "pipeline_parallel/test_stage_programs.py"),
        "pipeline_parallel/test_transform.py::test_a_value_that_three_stages_read",
    ),
    Fault(
        "pipeline_parallel/device_layout.py",
        "tuple(min(map(speed_of",
        "tuple(max(map(speed_of",
        ("pipeline_parallel/test_device_layout.py",),
        "pipeline_parallel/test_device_layout.py::test_a_stage_is_as_fast_as_its_slowest_device",
    ),
    Fault(
        "engine/layout.py",
        "sum(self.shares[: self.index])",
        "self.index * self.shares[self.index]",
        ("parameter_server/test_speeds.py",),
        "parameter_server/test_speeds.py::test_random_numbers_belong_to_the_rows_of_a_trainer",
    ),
    Fault(
        "step/batch_sharing.py",
        "found[max(range(len(found)), key=missing)] += 1",
        "found[0] += 1",
        ("parameter_server/test_speeds.py",),
        "parameter_server/test_speeds.py::test_shares_are_whole_rows",
    ),
    Fault(
        "parameter_server/plan.py",
        "flops = program_flops(self.trainer_program(k))",
        "flops = program_flops(self.trainer_program(0))",
        ("parameter_server/test_speeds.py",),
        "parameter_server/test_speeds.py::test_costs_follow_the_shares_and_bytes_do_not",
    ),
    Fault(
        "pipeline_parallel/balance.py",
        "        lambda part, stop: sent[stop],\n        lambda part, stop: first_unit[:stop]",
        "        lambda part, stop: 0.0,\n        lambda part, stop: first_unit[:stop]",
        ("pipeline_parallel/test_assign_stages.py",),
        "pipeline_parallel/test_assign_stages.py::test_balanced_is_optimal_in_all_four",
    ),
    Fault(
        "pipeline_parallel/orders.py",
        'if task.kind == "B" and task.micro >= device:',
        'if task.kind == "B" and task.micro > device:',
        ("pipeline_parallel/test_schedule.py", "pipeline_parallel/test_stage_programs.py"),
        "pipeline_parallel/test_schedule.py::test_known_orders",
    ),
    Fault(
        "protocol/server/trainer_turns.py",
        "            turn.grads.clear()\n",
        "",
        ("run/parameter_server/test_endpoints.py", "run/parameter_server/test_exchange.py"),
        "run/parameter_server/test_endpoints.py::"
        "test_two_trainers_and_two_pservers_equal_one_device_in_float64[momentum]",
    ),
    Fault(
        "protocol/tables/rows_ahead.py",
        "due = max(step, target - table.staleness)",
        "due = step",
        ("run/parameter_server/test_rows_ahead.py",),
        "run/parameter_server/test_rows_ahead.py::"
        "test_bits_are_those_of_a_job_that_waits[sgd-sparse1-2]",
    ),
    Fault(  # all tables of a group get the first rows
        "run/parameter_server/tables/table_groups.py",
        "            start = stop\n",
        "",
        ("run/parameter_server/test_table_groups.py",),
        "run/parameter_server/test_table_groups.py::"
        "test_groups_of_some_trainers_and_of_merged_gradients[None-False]",
    ),
    Fault(  # the value on which a trainer and the servers agree is one pull late
        "protocol/tables/cached_rows.py",
        "self._agree(ids, local + (rows - old), rows)",
        "self._agree(ids, local + (rows - old), old)",
        ("verification/test_asynchronous_tables.py",),
        "verification/test_asynchronous_tables.py::"
        "test_turns_are_those_of_the_replay[geo-adam-lazy]",
    ),
    Fault(  # a trainer receives its own changes, and not those of other trainers
        "protocol/tables/changed_rows.py",
        "if other != k and len(news):",
        "if other == k and len(news):",
        ("verification/test_asynchronous_tables.py",),
        "verification/test_asynchronous_tables.py::"
        "test_turns_are_those_of_the_replay[geo-adam-lazy]",
    ),
    Fault(  # a slot is filled again while another process reads it
        "run/net/shared_memory.py",
        "return not self.lent and (",
        "return (",
        ("run/net/test_shared_memory.py",),
        "run/net/test_shared_memory.py::"
        "test_a_slot_is_not_filled_again_while_an_array_of_jax_reads_it",
    ),
    Fault(
        "protocol/wire.py",
        "if offset != before:",
        "if offset < before:",
        ("protocol/test_wire.py", "run/parameter_server/test_endpoints.py"),
    ),
    Fault(
        "checkpoint/assemble.py",
        "found += _size(common)",
        "found += _size(box)",
        ("checkpoint/test_pserver_state.py", "checkpoint/test_collective_state.py"),
    ),
    Fault(  # a value that is a mean and a sum counts as a mean
        "batch/scaled.py",
        "(power,) = _merge_exponents([[ins[i]] for i in group])",
        "power = ins[group[0]]",
        ("batch/test_scaled.py",),
        "batch/test_scaled.py::test_what_does_not_scale[offset]",
    ),
    Fault(  # each trainer normalizes by its own statistics
        "engine/writer.py",
        """            self.define_outputs(eqn, [PARTIAL] * len(eqn.outvars), values)
            if self.in_local:""",
        """            self.define_outputs(eqn, way.outs, values)
            if self.in_local:""",
        BATCHES,
        "batch/test_step_zoo.py::test_a_plan_computes_the_step[mean_loss-nccl2-2-12]",
    ),
    Fault(  # padding is counted
        "engine/pieces.py",
        "if not self.shards.pads(size, row):",
        "if self.shards.count:",
        BATCHES,
        "batch/test_step_zoo.py::test_a_plan_computes_the_step[sum_loss-pserver-3-13]",
    ),
    Fault(  # trainers draw the same mask
        "engine/pieces.py",
        "b.call(times(local), self.index())",
        "b.call(times(0), self.index())",
        BATCHES,
        "batch/test_step_zoo.py::test_a_plan_computes_the_step[sum_loss-pserver-3-13]",
    ),
    Fault(  # a value that all trainers have is added up
        "engine/values.py",
        "(scaled,) = self.b.call(on_first, value, self.pieces.index())",
        "scaled = value",
        BATCHES,
        "batch/test_step_zoo.py::test_a_plan_computes_the_step[contrastive-stage 1-2-12]",
    ),
    Fault(  # a process that the launcher has replaced takes the place of the new one
        "protocol/server/trainer_registry.py",
        "< self._incarnations.get(k, 0):",
        "< 0:",
        ("protocol/test_generations.py",),
        "test_a_process_that_was_replaced_is_refused",
    ),
    Fault(  # a trainer that reconnects late never receives `goodbye`
        "protocol/server/trainer_registry.py",
        "            if t.failed:\n                t.messages.clear()",
        "            if t.parted or t.failed:\n                t.messages.clear()",
        ("protocol/test_trainer_registry.py",),
        "test_a_trainer_that_returns_late_receives_the_goodbye_again",
    ),
    Fault(  # the launcher goes back to a snapshot of steps that it has undone
        "run/net/role_marks.py",
        "        if mark.generation < generation:",
        "        if False:",
        ("protocol/test_exhaustive.py",),
        "test_a_snapshot_of_undone_steps_does_not_count",
    ),
    Fault(  # parts are added in the order of their arrival
        "protocol/server/trainer_rounds.py",
        "order = sorted(trainers)",
        "order = list(self._parts)",
        ("run/parameter_server/test_trainer_rounds.py",),
        "run/parameter_server/test_trainer_rounds.py::"
        "test_parts_are_added_up_in_the_order_of_trainers",
    ),
    Fault(  # servers average terms of a sum
        "parameter_server/transform.py",
        "summed = tuple(step.gradients)",
        "summed = ()",
        BATCHES,
        "batch/test_step_zoo.py::test_a_plan_computes_the_step[sum_loss-pserver-3-13]",
    ),
    Fault(  # a row filter admits a row one update too late
        "run/parameter_server/tables/table_memory.py",
        "counts = self.stored.counts(new) + 1",
        "counts = self.stored.counts(new)",
        ("run/parameter_server/test_row_filters.py",),
        "run/parameter_server/test_row_filters.py::test_the_third_update_of_a_row_admits_it[sgd]",
    ),
    Fault(  # a restored server has forgotten how many updates a row filter has counted
        "run/parameter_server/tables/stored_rows.py",
        "self._directory.put(ids, changed)",
        "self._directory.put(ids, split_counts(changed)[1])",
        ("run/parameter_server/test_row_filters.py", "run/parameter_server/test_snapshots.py"),
        "run/parameter_server/test_row_filters.py::"
        "test_a_copy_of_a_server_has_its_counts[1-from_snapshot]",
    ),
    Fault(  # a slice of several rows looks up its first row only
        "parameter_server/tables/trainer_rows.py",
        "return ids if count == 1 else jnp.ravel(run_ids(ids, count))",
        "return ids",
        ("run/parameter_server/test_row_runs.py",),
        "run/parameter_server/test_row_runs.py::"
        "test_a_lazy_update_changes_consecutive_rows[windows-sync]",
    ),
    Fault(  # rows miss a step
        "run/parameter_server/tables/missed_steps.py",
        "missed = lambda x: (seen <= i)",
        "missed = lambda x: (seen < i)",
        TABLES,
        "run/parameter_server/test_table_zoo.py::test_dense_is_one_device[B-rmsprop-range]",
    ),
    Fault(  # rows that enter a reduction are left out
        "parameter_server/tables/zero_gradient.py",
        "if not isinstance(kinds[0], np.ndarray) or kinds[0] != neutral:",
        "if not step.reduce:",
        TABLES,
        "run/parameter_server/test_table_zoo.py::test_dense_is_one_device[D-adafactor-bucket]",
    ),
    Fault(  # noise of other rows is added
        "parameter_server/tables/zero_gradient.py",
        "if not self._is_alike(a, row.axis):",
        "if not step:",
        TABLES,
        "run/parameter_server/test_table_zoo.py::test_dense_is_one_device[D-noisy_sgd-range]",
    ),
    Fault(  # a row of another server is used
        "rows/row_buckets.py",
        "return ids // self.count * self._width + ids % self.count - self.start",
        "return ids // self.count * self._width + ids % self.count",
        TABLES,
        "run/parameter_server/test_table_zoo.py::test_dense_is_one_device[A-adagrad-bucket]",
    ),
    Fault(  # a row that two trainers have looked up is updated twice
        "run/parameter_server/tables/row_updates.py",
        "return ids[0] if len(ids) == 1 else sorted_once(np.concatenate(ids))",
        "return ids[0] if len(ids) == 1 else np.sort(np.concatenate(ids))",
        TABLES,
        "run/parameter_server/test_table_zoo.py::test_dense_is_one_device[A-adagrad-bucket]",
    ),
    Fault(  # after a return to a snapshot, a batch that was loaded before is read
        "run/base/feeder.py",
        "            self.close()\n            self._go_to(step, lambda: self._source.seek(step))",
        "            self.position = step",
        ("run/base/test_between_steps.py",),
        "run/base/test_between_steps.py::test_a_feed_goes_back_and_ahead[function]",
    ),
    Fault(  # a loader goes back to a later batch than the wanted one
        "run/base/batch_source.py",
        "self._go_to(max(marks), self._marks[max(marks)])",
        "self._go_to(position, self._marks[max(marks)])",
        ("run/base/test_between_steps.py",),
        "run/base/test_between_steps.py::test_a_loader_skips_from_the_nearest_mark",
    ),
    Fault(  # a launcher does not wait for the roles of a killed one
        "run/distributed/restarts/job_folder.py",
        "lock = stack.enter_context(_lock(path, ROLES_LOCK, patience=ROLES_END))",
        "lock = stack.enter_context(_lock(path, LOCK + LOCK))",
        ("run/distributed/test_resume.py",),
        "run/distributed/test_resume.py::test_a_launcher_waits_for_the_roles_of_a_killed_one",
    ),
    Fault(  # a trainer joins a job that another trainer has left
        "run/distributed/restarts/job_generations.py",
        "can_go_back = self.have_all_entered and {*self._expected} <= {*running}",
        "can_go_back = {*self._expected} <= {*running}",
        ("run/distributed/test_job_generations.py",),
        "run/distributed/test_job_generations.py::test_a_trainer_joins_no_job_that_another_role_has_left",
    ),
    Fault(  # a replayed trainer that joins keeps its old parameters
        "run/role_jobs/log_replay.py",
        "self._trainers[k].params = self._trainers[self._members[0]].params",
        "pass",
        ("run/parameter_server/test_dropped_trainers.py",),
    ),
)


def notices(fault: Fault) -> tuple[str, float]:
    """Return the name of the first test that fails with a fault, and the seconds until it failed.

    The name is empty if no test fails in time.
    """
    with tempfile.TemporaryDirectory(prefix="fault") as folder:
        copy = Path(folder) / "copy"
        skip = shutil.ignore_patterns(".*", "__pycache__", "runs", "*.egg-info")
        shutil.copytree(ROOT, copy, ignore=skip)
        at = copy / "dtrans" / fault.file
        at.write_text(fault.planted(at.read_text()))
        files = [str(copy / "tests" / name) for name in fault.tests]
        runs = [("not soak", [str(copy / "tests" / fault.noticed_by)])] * bool(fault.noticed_by)
        runs += [("not soak", files), ("soak", files)]
        started = time.monotonic()
        env = {**os.environ, "PYTHONPATH": str(copy)}
        for which, tests in runs:
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                "-m",
                which,
                *tests,
            ]
            try:
                done = subprocess.run(
                    command, cwd=copy, env=env, capture_output=True, text=True, timeout=60 * MINUTES
                )
            except subprocess.TimeoutExpired:
                continue
            found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
            if found and done.returncode:
                return found[1] + f" ({which})" * (which == "soak"), time.monotonic() - started
        return "", time.monotonic() - started


def main(names: list[str]) -> int:
    """Plant the named faults, or all faults. Return the number of faults that no test noticed."""
    unnoticed = 0
    for fault in FAULTS:
        if not names or fault.name in names:
            test, seconds = notices(fault)
            print(f"{fault.file:32} {test or 'NOT NOTICED':80} {seconds:.0f} s", flush=True)
            unnoticed += not test
    return unnoticed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
