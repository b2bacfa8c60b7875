"""Selection and inversion of mappings, and the reads of equations."""

import jax
import jax.numpy as jnp
import pytest

from dtrans._jax import opened
from dtrans.ir.cost import nbytes, total_bytes
from dtrans.ir.dataflow import all_operands, avals, bits_of, variables, variables_read
from dtrans.ir.selection import invert, number_items, omit, retain, subset, values_at


def test_values_come_in_the_order_of_the_keys():
    values = {"a": 1, "b": 2, "c": 3}
    assert values_at(values, ["c", "a"]) == [3, 1]
    assert values_at((10, 20), [1, 1]) == [20, 20]
    assert list(subset(values, ("b", "a")).items()) == [("b", 2), ("a", 1)]
    with pytest.raises(KeyError, match="d"):
        subset(values, ["d"])


def test_entries_are_retained_or_omitted_in_the_order_of_the_mapping():
    values = {"a": 1, "b": 2, "c": 3}
    assert list(retain(values, {"c", "a", "d"}).items()) == [("a", 1), ("c", 3)]
    assert omit(values, {"c", "a", "d"}) == {"b": 2}


def test_inversion_and_numbers_of_items():
    assert invert({"a": 1, "b": 2}) == {1: "a", 2: "b"}
    assert number_items("xyz") == {"x": 0, "y": 1, "z": 2}


def test_variables_read_by_equations_and_outputs_are_listed_once():
    inner = opened(jax.make_jaxpr(lambda x, y: (x * 2.0 + x, y))(jnp.ones(3), jnp.ones(())))
    x, y = inner.invars
    product = inner.eqns[0].outvars[0]
    assert len(all_operands(inner.eqns)) == 4
    assert variables(all_operands(inner.eqns)) == [x, product, x]
    assert variables_read(inner.eqns, inner.outvars) == [x, product, inner.outvars[0], y]
    assert [a.shape for a in avals(inner.outvars)] == [(3,), ()]
    assert total_bytes(inner.outvars) == nbytes(x.aval) + nbytes(y.aval)


def test_bits_of_literals_and_unknown_variables_are_none():
    inner = opened(jax.make_jaxpr(lambda x, y: x * 2.0 + y)(1.0, 1.0))
    x, y = inner.invars
    assert bits_of({x: 1, y: 4}, *inner.eqns[0].invars) == 1
    assert bits_of({x: 1, y: 4}, x, y) == 5
    assert bits_of({}, x) == 0
