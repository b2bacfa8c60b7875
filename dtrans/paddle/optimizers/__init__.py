"""Paddle's optimizers, decays of the learning rate and clips of gradients, with the numbers of
Paddle 1.8.

Each optimizer and clip is an ordinary `optax.GradientTransformation`, with the update rule, names
and defaults of Paddle fluid 1.8 (python/paddle/fluid/optimizer.py, and the CPU kernels under
paddle/fluid/operators/optimizers/). Each decay is an ordinary schedule. A job that moves here keeps
its losses; where the kernel is not what it is named after, `fix=True` gives the rule of the paper.

    here              differs from the paper                         and from optax's, by default too
    sgd, momentum     no                                             no
    adam              sqrt(v) + eps, not corrected; `fix`            is the paper's
    adamw             decay not times the learning rate; `fix`       decays by learning rate · weight decay
    adamax            max(|g|, beta2·u + eps); `fix`                 max(|g| + eps, beta2·u)
    adagrad           no                                             sqrt(m + eps), m from 0.1
    decayed_adagrad   has none                                       is rmsprop with eps_in_sqrt=False
    adadelta          the average of updates is one step ahead,      is the paper's, times the learning rate
                      and there is no learning rate; `fix`
    rmsprop           no                                             decay 0.9, eps 1e-8
    ftrl              l2 is l1; `fix`                                has none
    lamb              no bias correction; `fix`                      is the paper's
    lars_momentum     no                                             divides by ‖g + weight decay · p‖
    dpsgd             one noise for all elements; `fix`              clips the gradient of each example

What Paddle's optimizers do before their op is chained in Paddle's order: clips, then
regularization.

    optax.chain(gradient_clip_by_global_norm(1.0), optax.add_decayed_weights(c), momentum(0.1, 0.9))   # L2Decay(c)

L1Decay is an `optax.stateless` that adds c·sign(param) in the same place. Learning rates by
parameter are `optax.partition`, Lookahead is `optax.lookahead`, ExponentialMovingAverage
`optax.incremental_update`. DGC and ModelAverage have no counterpart.

Arguments that pick parameters (`need_clip`, `apply_decay_param_fun`,
`exclude_from_weight_decay_fn`) are functions of a leaf's path, e.g. `dense/bias`, where Paddle
hands them the parameter or its name.
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
