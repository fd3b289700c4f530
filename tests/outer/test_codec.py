"""Properties of the codecs: size, bounds, packing, determinism, error feedback, refusals."""

import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from geotrain.config import CodecConfig, ConfigError, codec_config, parse
from geotrain.kernels import reference
from geotrain.kernels.payload_format import FORMATS, PayloadFormat
from geotrain.outer.codec import CodecError, NonFiniteError, make_codec, residual_dtype, rounding_seed

LEVELS = {"int8": list(range(128)), "int4": list(range(8)), "e3m0": [0, 1, 2, 4, 8, 16, 32, 64]}
BLOCKS = [32, 64, 128]
SLACK = 2.0**-100  # below this a block is coded as zero


def any_codec(name: str, **settings: Any) -> CodecConfig:
    """The codec with those of the settings that it has."""
    known = {"fp32": (), "bf16": (), "topk2": ("block", "density")}.get(name, ("block",))
    return codec_config(name, **{key: value for key, value in settings.items() if key in known})


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
arrays = st.lists(floats | st.sampled_from([0.0, -0.0, 1e-45, 1.0, -1.0]), max_size=150) | st.builds(
    lambda n, seed, scale: (torch.randn(n, generator=torch.Generator().manual_seed(seed)) * scale).tolist(),
    st.integers(0, 400),
    st.integers(0, 1000),
    st.sampled_from([1e-30, 1e-3, 1.0, 1e20]),
)
configs = st.builds(
    any_codec,
    name=st.sampled_from(FORMATS),
    block=st.sampled_from(BLOCKS),
    density=st.sampled_from([0.01, 0.1, 0.5, 1.0]),
)


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def scales(payload: torch.Tensor, numel: int, config: CodecConfig) -> torch.Tensor:
    """The scale of each element, read from the payload by hand."""
    found = []
    for block in range(math.ceil(numel / config.block)):
        bits = int.from_bytes(bytes(payload[2 * block : 2 * block + 2].tolist()), "little") << 16
        found.append(struct.unpack("<f", struct.pack("<I", bits))[0])
    return torch.tensor(found, dtype=torch.float64).repeat_interleave(config.block)[:numel]


@given(configs, arrays, st.integers(0, 2**64 - 1))
def test_size_determinism_and_nothing_lost(config, values, seed):
    codec, x = make_codec(config), tensor(values)
    residual, again = torch.zeros_like(x), torch.zeros_like(x)
    try:
        encoded = codec.encode(x, residual=residual, seed=seed)
    except NonFiniteError:
        assert not torch.isfinite(x).all()  # no finite input is refused
        return
    assert encoded.payload.numel() == codec.encoded_bytes(len(x)) and encoded.payload.dtype == torch.uint8
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(codec.encode(x.clone(), residual=again, seed=seed).payload, encoded.payload)
    finally:
        torch.set_num_threads(threads)
    decoded = codec.decode(encoded.payload, len(x))
    assert torch.isfinite(decoded).all()
    assert torch.equal(residual, x - decoded) and torch.equal(residual, again)
    out = torch.ones(len(x))
    codec.decode_accumulate(encoded.payload, out, -2.0)
    assert torch.equal(out, 1.0 + torch.tensor(-2.0) * decoded)


@given(configs.filter(lambda c: c.name in LEVELS), arrays, st.integers(0, 100))
def test_block_formats_round_to_the_nearest_level(config, values, seed):
    codec, x = make_codec(config), tensor(values)
    payload = codec.encode(x, seed=seed).payload
    decoded, scale = codec.decode(payload, len(x)).double(), scales(payload, len(x), config)
    levels = torch.tensor(LEVELS[config.name], dtype=torch.float64)[None, :] * scale[:, None]
    distance = (x.double().abs()[:, None] - levels).abs()
    assert ((decoded.abs()[:, None] - levels).abs().min(1).values <= 1e-6 * decoded.abs()).all()
    assert (decoded * x >= 0).all()
    error = (x.double() - decoded).abs()
    bound = distance.min(1).values
    top = x.double().abs() > levels[:, -1]  # the largest magnitude may exceed its rounded scale by a rounding error
    assert (error <= torch.where(top, distance[:, -1], bound) * (1 + 1e-5) + 1e-5 * scale + SLACK).all()


@given(st.sampled_from(list(LEVELS)), st.sampled_from(BLOCKS), st.integers(-90, 90), st.data())
def test_what_a_format_can_say_comes_back_exactly(name, block, exponent, data):
    largest = LEVELS[name][-1]
    signed = st.sampled_from([s * level for level in LEVELS[name] for s in (1, -1)])
    values = data.draw(st.lists(signed, min_size=1, max_size=200))
    values[::block] = [largest] * len(values[::block])  # sets each block's scale
    x = tensor(values) * 2.0**exponent
    codec = make_codec(codec_config(name, block=block))
    assert torch.equal(codec.decode(codec.encode(x).payload, len(x)), x)


@given(arrays)
def test_bf16_is_torchs_bf16_except_that_it_never_overflows(values):
    codec, x = make_codec(codec_config("bf16")), tensor(values)
    decoded = codec.decode(codec.encode(x).payload, len(x))
    wanted = x.bfloat16().float()
    fits = torch.isfinite(wanted)
    assert torch.equal(decoded[fits], wanted[fits])
    assert ((decoded - x).abs() <= x.abs() * 2.0**-7 + 1e-40).all()


@given(arrays.filter(len), st.sampled_from([0.01, 0.1, 0.5, 1.0]), st.sampled_from(BLOCKS))
@example([0.0, 0.0, 0.0, 1857350017220608.0, 5572050588532736.0], 1.0, 32)  # one just at the middle of both
def test_topk_sends_the_largest_of_each_block(values, density, block):
    codec, x = make_codec(codec_config("topk2", block=block, density=density)), tensor(values)
    decoded = codec.decode(codec.encode(x).payload, len(x))
    for part, sent in zip(x.split(block), decoded.split(block), strict=True):
        kept = max(1, math.ceil(density * len(part)))
        order = torch.sort(part.abs(), descending=True, stable=True).indices
        largest = order[:kept]
        if part.abs().max() < SLACK:
            assert (sent == 0).all()
            continue
        assert (sent[order[kept:]] == 0).all()
        assert sent.abs().unique().numel() <= 3  # zero and two magnitudes
        assert (sent * part >= 0).all()
        # Means are found in 16-bit fixed point, of which 2⁻¹⁵ is lost; then each is rounded to the 8 bits of bf16, so
        # it is off by at most 2⁻⁸ of itself. Which of the two an element has follows from them as they are sent.
        in_fixed = part.abs().max() * 1e-4
        tolerance = in_fixed + part.abs().max() * 2.0**-8
        assert sent[largest].abs().min() >= part[largest].abs().min() - tolerance
        assert sent.abs().max() <= part.abs().max() + tolerance
        # the magnitudes are means, of what lies above the mean and of the rest; each element has the nearer one
        wanted, levels = part[largest].abs(), sent[largest].abs().unique()
        mean = wanted.double().mean()
        if ((wanted - mean).abs() > in_fixed).all():  # else fixed point decides on which side the nearest lie
            assert abs(levels.max() - wanted[wanted > mean].double().mean()) <= tolerance
            assert abs(levels.min() - wanted[wanted < mean].double().mean()) <= tolerance
        nearest = (wanted[:, None] - levels).abs().amin(1)
        assert ((sent[largest].abs() - wanted).abs() <= nearest + in_fixed).all()


@pytest.mark.parametrize("name", FORMATS)
def test_error_feedback_sends_in_sum_what_was_meant(name):
    codec = make_codec(any_codec(name, density=0.1))
    torch.manual_seed(1)
    drift = torch.randn(1000) * 0.01  # steady, and small against the noise: what plain rounding loses
    residual, sent, meant = torch.zeros(1000), torch.zeros(1000, dtype=torch.float64), torch.zeros(1000).double()
    without = torch.zeros(1000, dtype=torch.float64)
    for step in range(200):
        values = drift + torch.randn(1000) * 0.1
        meant += values
        sent += codec.decode(codec.encode(values, residual=residual, seed=step).payload, 1000)
        without += codec.decode(codec.encode(values, seed=step).payload, 1000)
    torch.testing.assert_close(sent + residual, meant, rtol=0, atol=1e-4)
    error, error_without = (sent - meant).norm() / meant.norm(), (without - meant).norm() / meant.norm()
    if name == "fp32":
        assert error == 0 and not codec.error_feedback and residual_dtype(codec_config(name), False) is None
        return
    assert codec.error_feedback
    assert error < {"bf16": 1e-3, "int8": 2e-3, "topk2": 0.45}.get(name, 0.05)
    assert error < 0.7 * error_without


def test_the_one_pass_delta_is_anchor_minus_weights():
    torch.manual_seed(0)
    anchor, weights = torch.randn(777), torch.randn(777)
    for name in FORMATS:
        codec = make_codec(codec_config(name))
        for w in (weights, weights.bfloat16()):
            one, two = torch.full((777,), 0.25), torch.full((777,), 0.25)
            a = codec.encode(w, anchor=anchor, residual=one, seed=3)
            b = codec.encode(anchor - w.float(), residual=two, seed=3)
            assert torch.equal(a.payload, b.payload) and torch.equal(one, two)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_input_is_refused_by_name(name, bad):
    codec = make_codec(codec_config(name))
    x, residual = torch.ones(300), torch.zeros(300)
    x[200] = bad
    with pytest.raises(NonFiniteError, match=r"layers\.3\.weight.*NaN"):
        codec.encode(x, residual=residual, what="layers.3.weight")
    assert torch.isfinite(residual).all()


@pytest.mark.parametrize("name", FORMATS)
def test_a_bad_payload_is_refused_before_anything_is_written(name):
    codec = make_codec(codec_config(name))
    payload, out = codec.encode(torch.randn(300)).payload, torch.full((300,), 7.0)
    spoiled = payload.clone()
    spoiled[:4] = 255
    for wrong in (payload[:-1], torch.cat([payload, payload[:1]]), spoiled, payload.view(1, -1), payload.float()):
        with pytest.raises(CodecError, match=name):
            codec.decode(wrong, 300, out=out)
        with pytest.raises(CodecError, match=name):
            codec.decode_accumulate(wrong, out, 2.0)
    with pytest.raises(CodecError):
        codec.decode(payload, 300, out=torch.zeros(299))
    with pytest.raises(CodecError):
        codec.decode(payload, 300, out=torch.zeros(600)[::2])
    assert (out == 7.0).all()


@given(st.sampled_from(FORMATS), st.integers(1, 300), st.binary(min_size=1, max_size=64), st.integers(0, 10**6))
def test_a_hostile_payload_is_refused_or_decodes_to_finite_values(name, numel, noise, at):
    codec = make_codec(any_codec(name, block=64))
    payload = codec.encode(torch.ones(numel)).payload
    for i, byte in enumerate(noise):
        payload[(at + i) % len(payload)] = byte
    fenced = torch.full((numel + 64,), 5.0)
    try:
        codec.decode(payload, numel, out=fenced[32 : 32 + numel])
    except CodecError:
        assert (fenced == 5.0).all()
        return
    assert torch.isfinite(fenced).all()
    assert (fenced[:32] == 5.0).all() and (fenced[-32:] == 5.0).all()
    wanted = torch.zeros(numel)
    reference.dequantize(payload, wanted, PayloadFormat(name, block=64), None, None)
    assert torch.equal(fenced[32 : 32 + numel], wanted)


def test_payloads_may_lie_at_any_address():
    for name in FORMATS:
        codec, x = make_codec(codec_config(name)), torch.randn(333)
        payload = codec.encode(x).payload
        for shift in (1, 2, 3):
            moved = torch.cat([torch.zeros(shift, dtype=torch.uint8), payload])[shift:]
            assert torch.equal(codec.decode(moved, 333), codec.decode(payload, 333))


def test_sizes_stated_in_the_documentation():
    sizes = {"fp32": 32, "bf16": 16, "int8": 8.125, "int4": 4.125, "e3m0": 4.125}
    for name, bits in sizes.items():
        assert make_codec(codec_config(name)).encoded_bytes(1 << 20) * 8 == bits * (1 << 20)
    topk = make_codec(codec_config("topk2", block=1024, density=0.1))
    assert 0.7 < topk.encoded_bytes(1 << 20) * 8 / (1 << 20) < 0.8
    everything = make_codec(codec_config("topk2", density=1.0))
    assert everything.encoded_bytes(1 << 20) * 8 == 2.25 * (1 << 20)


def test_rounding_seeds_are_the_same_in_every_process():
    """A replay gives the same bits only by seeds that were not drawn."""
    assert rounding_seed("eu-0", 1, 7, 3) == 754844283216742510


def test_other_dtypes_and_devices_are_refused_in_words():
    codec = make_codec(codec_config("int4"))
    with pytest.raises(CodecError, match=r"w: .*values must be contiguous float32 or bfloat16, is float16"):
        codec.encode(torch.zeros(4, dtype=torch.float16), what="w")
    with pytest.raises(CodecError, match="residual must have 4 elements"):
        codec.encode(torch.zeros(4), residual=torch.zeros(5))
    with pytest.raises(CodecError, match="anchor must be contiguous float32"):
        codec.encode(torch.zeros(4), anchor=torch.zeros(4, dtype=torch.bfloat16))


def test_a_block_that_the_kernels_do_not_take_is_a_config_error():
    with pytest.raises(ConfigError, match="block = 100"):
        parse(CodecConfig, {"name": "int4", "block": 100}, "run.json")
    with pytest.raises(ValueError, match="block = 100 must be a power of two from 32 to 4096"):
        PayloadFormat("int4", block=100)
