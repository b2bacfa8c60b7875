"""Paddle's optimizers, learning rate decays and gradient clips, as in Paddle 1.8.

Optimizers and clips are `optax.GradientTransformation`s with the update rules, names and defaults
of Paddle fluid 1.8. Each decay is an optax schedule. So a job that moves from Paddle to dtrans has
the same losses. Sources: python/paddle/fluid/optimizer.py, and the CPU kernels under
paddle/fluid/operators/optimizers/.

Some kernels deviate from the paper that they are named after. Then the argument `fix=True` selects
the paper's rule:

    function          deviation from the paper                   rule in optax
    sgd, momentum     none                                       the same
    adam              eps added to sqrt(v) before the bias       the paper's
                      correction
    adamw             decay not multiplied by learning rate      learning rate · weight decay
    adamax            max(|g|, beta2·u + eps)                    max(|g| + eps, beta2·u)
    adagrad           none                                       sqrt(m + eps), m from 0.1
    decayed_adagrad   (no paper)                                 rmsprop(eps_in_sqrt=False)
    adadelta          changes the average of updates before      the paper's, times the
                      reading it, no learning rate               learning rate
    rmsprop           none                                       the same; decay 0.9, eps 1e-8
    ftrl              l1 used in place of l2                     (not in optax)
    lamb              no bias correction                         the paper's
    lars_momentum     none                                       divides by ‖g + decay · p‖
    dpsgd             one random number for all elements         clips each example's gradient

Paddle's optimizers clip, then regularize, then update. Chain transformations in this order:

    l2_decay = optax.add_decayed_weights(0.01)
    optax.chain(gradient_clip_by_global_norm(1.0), l2_decay, momentum(0.1, 0.9))

For L1Decay, put an `optax.stateless` that adds c·sign(param) in place of `l2_decay`. Use
`optax.partition` for learning rates by parameter, `optax.lookahead` for Lookahead, and
`optax.incremental_update` for ExponentialMovingAverage. In place of DGCMomentum, use
`sgd` with `DistributeTranspilerConfig(dgc=dtrans.paddle.DGCMomentum(...))`. ModelAverage has no
counterpart.

The arguments `need_clip`, `apply_decay_param_fun` and `exclude_from_weight_decay_fn` select
parameters. They are functions of a leaf's path, for example `dense/bias`. (Paddle passes the
parameter or its name.)
"""

from dtrans.paddle.optimizers.adaptive import (
    AdadeltaState as AdadeltaState,
    AdagradState as AdagradState,
    DecayedAdagradState as DecayedAdagradState,
    FtrlState as FtrlState,
    adadelta as adadelta,
    adagrad as adagrad,
    decayed_adagrad as decayed_adagrad,
    ftrl as ftrl,
    rmsprop as rmsprop,
)
from dtrans.paddle.optimizers.clips import (
    gradient_clip_by_global_norm as gradient_clip_by_global_norm,
    gradient_clip_by_norm as gradient_clip_by_norm,
    gradient_clip_by_value as gradient_clip_by_value,
)
from dtrans.paddle.optimizers.decays import (
    cosine_decay as cosine_decay,
    exponential_decay as exponential_decay,
    inverse_time_decay as inverse_time_decay,
    linear_lr_warmup as linear_lr_warmup,
    multi_step_decay as multi_step_decay,
    natural_exp_decay as natural_exp_decay,
    noam_decay as noam_decay,
    piecewise_decay as piecewise_decay,
    polynomial_decay as polynomial_decay,
    step_decay as step_decay,
)
from dtrans.paddle.optimizers.gradient_descent import (
    LarsMomentumState as LarsMomentumState,
    NoiseState as NoiseState,
    dpsgd as dpsgd,
    lars_momentum as lars_momentum,
    momentum as momentum,
    sgd as sgd,
)
from dtrans.paddle.optimizers.leafwise import LearningRate as LearningRate, Scalar as Scalar
from dtrans.paddle.optimizers.moments import (
    AdamaxState as AdamaxState,
    AdamState as AdamState,
    LambState as LambState,
    adam as adam,
    adamax as adamax,
    adamw as adamw,
    lamb as lamb,
)
