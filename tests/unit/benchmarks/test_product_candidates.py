"""The tiles that the tuner of weight-streaming products measures, for every shipped shape."""

from typing import Any

import pytest
import torch

from benchmarks.kernels.dense_layer import Model, Product, dense_shapes, model_of, rank_shape
from benchmarks.kernels.product_candidates import candidates
from tandem.engine.kernels.linear.triton_linear_plan import TOKEN_TILES, fits_scratch
from tandem.engine.kernels.linear.triton_linear_tiles import TUNED, Skinny
from tandem.engine.models.allocation import allocate_parameters
from tandem.engine.models.shapes import shape_config

EARLY = [512]
TOKENS = (1, *TOKEN_TILES)


@pytest.fixture(params=dense_shapes())
def model(request: pytest.FixtureRequest) -> Model:
    return model_of(request.param, shape_config(request.param))


def test_the_products_are_all_weights_of_the_model(model: Model) -> None:
    weights = allocate_parameters(shape_config(model.name), torch.bfloat16, torch.device("meta"))
    *layer, head = model.products
    assert head.n * head.k == weights.lm_head.numel()
    attention: Any = weights.layers[0].attention
    feed_forward: Any = weights.layers[0].feed_forward
    of_a_layer = (attention.qkv, attention.output, feed_forward.gate_up, feed_forward.down)
    assert model.layers == len(weights.layers)
    assert [product_shape.n * product_shape.k for product_shape in layer] == [weight.numel() for weight in of_a_layer]


def test_every_size_has_something_to_measure(model: Model) -> None:
    for product in model.products:
        for tokens in TOKENS:
            tiles = candidates(product, tokens, EARLY)
            assert tiles, (product, tokens)
            for tile in tiles:
                if isinstance(tile, Skinny):
                    assert tile.tokens >= tokens
                    assert fits_scratch(tile, -(-product.outputs // tile.rows), product.paired)


def test_the_table_holds_what_the_tuner_may_find() -> None:
    models = [model_of(name, shape_config(name)) for name in dense_shapes()]
    models += [model_of(name, rank_shape(name, 2)) for name in ("llama-3-8b", "llama-3-70b")]
    products: dict[tuple[int, int, bool], Product] = {
        (product.n, product.k, product.paired): product for model in models for product in model.products
    }
    for shape, by_bucket in TUNED.items():
        for bucket, tile in by_bucket.items():
            assert tile in candidates(products[shape], bucket, EARLY), (shape, bucket)
