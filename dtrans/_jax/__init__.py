"""Access to parts of JAX without a documented API: only this folder depends on JAX internals.

    imports      imports from modules without a stability promise
    versions     tested versions of JAX
    jaxprs       open and closed jaxprs
    own          construction of dtrans's primitives
    origins      name stack, source line and author of an equation
    primitives   a record of properties for each primitive
    equation_params  parameters of loops, branches, calls and collectives
    user_meshes  removal of a user's meshes and shardings from programs
    runtime      devices and processes

Tests check that no file outside this folder imports an unstable module, names a parameter of an
equation, or uses `.jaxpr.jaxpr`. Each module imports only modules above it in this list.
"""

from dtrans._jax.equation_params import (
    CALLBACKS as CALLBACKS,
    BodyIndices as BodyIndices,
    axes_of as axes_of,
    bodies as bodies,
    body_indices as body_indices,
    call_body as call_body,
    call_operands as call_operands,
    checkpoint_name_of as checkpoint_name_of,
    closed_over as closed_over,
    combiner_of as combiner_of,
    has_bodies as has_bodies,
    host_function as host_function,
    is_ordered as is_ordered,
    is_reversed as is_reversed,
    linear_solve as linear_solve,
    params_besides_bodies as params_besides_bodies,
    rebuilt as rebuilt,
    scan_counts as scan_counts,
    scan_iterations as scan_iterations,
    scan_length as scan_length,
    scan_with as scan_with,
    shard_map_of as shard_map_of,
    while_counts as while_counts,
    with_bodies as with_bodies,
)
from dtrans._jax.imports import (
    Atom as Atom,
    ClosedJaxpr as ClosedJaxpr,
    Jaxpr as Jaxpr,
    JaxprEqn as JaxprEqn,
    Literal as Literal,
    Primitive as Primitive,
    ProcessFailureError as ProcessFailureError,
    ShapedArray as ShapedArray,
    Var as Var,
    jaxpr_as_fun as jaxpr_as_fun,
    jaxprs_in_params as jaxprs_in_params,
    live_devices as live_devices,
    new_jaxpr_eqn as new_jaxpr_eqn,
    threefry2x32_p as threefry2x32_p,
)
from dtrans._jax.jaxprs import (
    HoldsJaxpr as HoldsJaxpr,
    NamedJaxpr as NamedJaxpr,
    abstract_eval as abstract_eval,
    closed as closed,
    closed_with as closed_with,
    constants as constants,
    equations as equations,
    equations_inside as equations_inside,
    evaluate as evaluate,
    is_jaxpr as is_jaxpr,
    is_traced as is_traced,
    live_part as live_part,
    lowered_jaxpr as lowered_jaxpr,
    map_bodies as map_bodies,
    named_in_errors as named_in_errors,
    opened as opened,
    resized as resized,
    small_jaxpr as small_jaxpr,
    with_equations as with_equations,
)
from dtrans._jax.origins import (
    from_line_of as from_line_of,
    is_callback_on_rows as is_callback_on_rows,
    line_of as line_of,
    origin_of as origin_of,
    scope_of as scope_of,
    within_scope as within_scope,
)
from dtrans._jax.own import (
    is_zero as is_zero,
    new_effectful as new_effectful,
    new_identity as new_identity,
    new_primitive as new_primitive,
)
from dtrans._jax.primitives import (
    COND as COND,
    CUSTOM_JVP as CUSTOM_JVP,
    CUSTOM_RULES as CUSTOM_RULES,
    CUSTOM_VJP as CUSTOM_VJP,
    FACTS as FACTS,
    LOOPS as LOOPS,
    REMAT as REMAT,
    SCAN as SCAN,
    WHILE as WHILE,
    facts_of as facts_of,
    is_identity as is_identity,
    is_known as is_known,
    is_rearrangement as is_rearrangement,
    linear_group as linear_group,
    linear_operands as linear_operands,
    mixed_axes as mixed_axes,
    moved_operands as moved_operands,
    same_operand as same_operand,
    scaling_operands as scaling_operands,
    warn_if_unknown as warn_if_unknown,
    zeros_by as zeros_by,
)
from dtrans._jax.runtime import (
    backends_started as backends_started,
    bulletin_board as bulletin_board,
    coordinator as coordinator,
    detected_coordinator as detected_coordinator,
    gloo_scatters_wrongly as gloo_scatters_wrongly,
    has_coordinator_mtls as has_coordinator_mtls,
    is_varying as is_varying,
    job_size as job_size,
    let_gloo_bind as let_gloo_bind,
)
from dtrans._jax.user_meshes import (
    current_mesh as current_mesh,
    plain_array as plain_array,
    plain_jaxpr as plain_jaxpr,
    plain_type as plain_type,
    within_mesh as within_mesh,
    without_mesh as without_mesh,
)
from dtrans._jax.versions import warn_untested


warn_untested()
