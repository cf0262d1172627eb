"""Rates: what share of a card's peaks each kind of work reaches, every share with its source.

One set of shares, fitted on H100 timings, holds for every card. What is known of another card is the best product that
was measured on it (``profiles/card_shares.toml``): it scales the share of products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.hardware import Hardware

MATMUL = 0.73
ATTENTION = 0.55
MASKED_ATTENTION = 0.20
ELEMENTWISE = 0.50
STREAMING = 0.86
EXPERTS = 0.146
FP32_MATMUL = 0.79
"""Shares of the card's peak rates, fitted together on 20 published step times of TRL runs on H100 (mean error 3.3 %,
worst 12.8 %): matmul, causal flash attention, masked attention, eager elementwise, large streaming kernels, grouped
expert matmul, fp32 matmul without tensor cores. The fit gave 0.20 over all products of Qwen3-30B-A3B, which is 0.146
over its routed ones with the others at 0.73."""
FLASH_2_ON_HOPPER = 0.33
"""Share that FlashAttention 2 reaches on Hopper and newer, whose instructions it does not use: a million tokens of
Qwen3-8B on 8 H100 take 606 s with it and 373 s with cuDNN's kernel (transformers pull request 48324), and its own page
gives 335 of 989 TFLOP/s. On Ampere and Ada it is the kernel that SDPA runs as well."""
FP32_OF_HALF = 1 / 16
"""fp32 without tensor cores as a share of a card's bf16 rate, where its own is not known: 19.5 of 312 TFLOP/s on the
data sheet of the A100."""
LINEAR_KERNELS = 0.20
"""Share for the kernels of linear attention: products of 64 x 64 and 128 x 128. Not measured here."""
REFERENCE_CEILING = 0.803
"""Best product measured on the card that the shares were fitted on, H100 SXM, as a share of its rate."""

FITTED_ERROR = 0.20
CEILING_ERROR = 0.25
DATA_SHEET_ERROR = 0.35
"""Half-widths said for a time: on the card that the shares were fitted on and its sisters of the same chip; where the
card's best product was measured; where the data sheet is all there is. docs/time.md says how many of the recorded times
lie inside."""
MEASURED_ERROR = 0.20
"""The same where a probe measured the card's products, bandwidth and links: what is left is how training reaches them,
which is all that there is of the card that the shares were fitted on."""
CPU_FACTOR = 4.0
"""A CPU's rates are guessed from its cores: the interval is a factor of this each way."""
MEASURED_CPU_FACTOR = 2.0
"""The same where a probe measured the CPU's products and bandwidth: the shares are a card's all the same."""

FITTED_CARDS = ("H100-80GB", "H200", "GH200")
"""Ids of cards with that chip: clocks and power are alike, memory differs."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What one card reaches: FLOP/s of each kind of product, bytes/s of each kind of kernel."""

    matmul: float
    attention: float
    flash_2: float
    masked_attention: float
    experts: float
    fp32_matmul: float
    linear_kernels: float
    elementwise: float
    streaming: float
    peak: float
    """Dense matmuls, for model FLOPs utilisation."""
    error: float
    """Half-width of the interval of a step's time, as a share of it."""

    def attention_of(self, kernel: str) -> float:
        """The rate of causal attention under an attention implementation's name."""
        return self.flash_2 if kernel == "flash_attention_2" else self.attention


def rates_of(hardware: Hardware) -> Rates | None:
    """What ``hardware``'s card reaches, None where its peaks are not known."""
    peak, bandwidth = hardware.matmul_flops, hardware.bandwidth
    if peak is None or bandwidth is None:
        return None
    ceiling = hardware.matmul_ceiling
    matmul = MATMUL * (ceiling / REFERENCE_CEILING if ceiling else 1.0) * peak
    fp32 = FP32_MATMUL * (hardware.fp32_flops or FP32_OF_HALF * peak)
    unfitted = CEILING_ERROR if ceiling else DATA_SHEET_ERROR
    if hardware.measured:
        unfitted = MEASURED_ERROR
    return Rates(
        matmul=matmul,
        attention=ATTENTION * peak,
        flash_2=(FLASH_2_ON_HOPPER if _hopper_or_newer(hardware.compute_capability) else ATTENTION) * peak,
        masked_attention=MASKED_ATTENTION * peak,
        experts=EXPERTS * peak,
        fp32_matmul=fp32,
        linear_kernels=LINEAR_KERNELS * peak,
        elementwise=ELEMENTWISE * bandwidth,
        streaming=STREAMING * bandwidth,
        peak=peak,
        error=FITTED_ERROR if hardware.name in FITTED_CARDS else unfitted,
    )


def fp32_rates_of(hardware: Hardware) -> Rates | None:
    """The same kinds of work in fp32 throughout: the shares, of the fp32 peak. Bytes take what they took."""
    rates, peak = rates_of(hardware), hardware.fp32_flops
    if rates is None or not peak:
        return rates
    return replace(
        rates,
        matmul=rates.fp32_matmul,
        experts=rates.fp32_matmul,
        attention=ATTENTION * peak,
        flash_2=ATTENTION * peak,
        masked_attention=MASKED_ATTENTION * peak,
        linear_kernels=LINEAR_KERNELS * peak,
    )


def _hopper_or_newer(capability: str | None) -> bool:
    return capability is not None and int(capability.split(".")[0]) >= 9
