"""Eight virtual CPU devices before JAX starts, and how hypothesis runs."""

import os

import jax
from hypothesis import HealthCheck, settings


jax.config.update("jax_num_cpu_devices", 8)

settings.register_profile(
    "dtrans", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.register_profile("ci", settings.get_profile("dtrans"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dtrans")
