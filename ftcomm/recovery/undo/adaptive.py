"""Inverses of Adam, AdamW, NAdam, RAdam, RMSprop and Adagrad, in the order of torch's single-tensor code.

Each takes the parameter back first, with the moments as they are after the step, and then the moments: with coupled weight decay
the gradient they saw depends on the parameter before the step.
"""

from __future__ import annotations

from typing import Any

from ftcomm.recovery.undo.rule import (
    Rule,
    Settings,
    Stepped,
    average_back,
    ill,
    negated,
    number,
    square_back,
    wide,
    with_decay,
)

__all__ = ["AdagradRule", "AdamRule", "AdamaxRule", "NAdamRule", "RAdamRule", "RMSpropRule"]


class AdamRule(Rule):
    name = "Adam"

    def no_plain(self, settings: Settings) -> str:
        if settings.get("amsgrad"):
            return "amsgrad=True keeps a maximum, and max() forgets what it was of"
        beta1, beta2 = (number(beta) for beta in settings["betas"])
        reason = ill(f"beta1={beta1:g}", beta1) or ill(f"beta2={beta2:g}", beta2)
        if reason or not settings["decoupled_weight_decay"]:
            return reason
        return ill("1 - lr * weight_decay", 1 - number(settings["lr"]) * number(settings["weight_decay"]))

    def invert(self, s: Stepped) -> None:
        grad, decay, (beta1, beta2) = negated(s), s.get("weight_decay"), s.betas
        before = self.parameter(s, grad)
        if s.settings["decoupled_weight_decay"]:
            before /= 1 - s.get("lr") * decay
        s.p.copy_(before)
        if not s.settings["decoupled_weight_decay"]:
            grad = with_decay(grad, s.p, decay)
        average_back(s, "exp_avg", grad, beta1)
        square_back(s, "exp_avg_sq", grad, beta2)

    def parameter(self, s: Stepped, grad: Any) -> Any:
        """The parameter before the step, but after decoupled weight decay."""
        step, (beta1, beta2) = number(s.state["step"]), s.betas
        denom = (s.state["exp_avg_sq"].sqrt() / (1 - beta2**step) ** 0.5).add_(s.get("eps"))
        return wide(s.p) + wide(s.state["exp_avg"]) / wide(denom) * (s.get("lr") / (1 - beta1**step))


class RAdamRule(AdamRule):
    name = "RAdam"

    def parameter(self, s: Stepped, grad: Any) -> Any:
        step, (beta1, beta2) = number(s.state["step"]), s.betas
        update = wide(s.state["exp_avg"] / (1 - beta1**step)) * s.get("lr")
        bias_correction2 = 1 - beta2**step
        longest = 2 / (1 - beta2) - 1
        length = longest - 2 * step * beta2**step / bias_correction2
        if length > 5.0:
            rectified = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
            root = s.state["exp_avg_sq"].sqrt().add_(s.get("eps"))
            update *= bias_correction2**0.5 / wide(root) * rectified**0.5
        return wide(s.p) + update


class NAdamRule(AdamRule):
    name = "NAdam"
    scalars = frozenset({"step", "mu_product"})

    def parameter(self, s: Stepped, grad: Any) -> Any:
        of_grad, of_average, denom = self._parts(s)
        change = (wide(grad) * of_grad + wide(s.state["exp_avg"]) * of_average) / denom
        if s.settings["decoupled_weight_decay"] or s.get("weight_decay") == 0:
            return wide(s.p) + change
        return (wide(s.p) + change) / (1 - of_grad * s.get("weight_decay") / denom)

    def weakest(self, s: Stepped) -> float:
        if s.settings["decoupled_weight_decay"] or s.get("weight_decay") == 0:
            return 1.0
        of_grad, _, denom = self._parts(s)
        return smallest(1 - of_grad * s.get("weight_decay") / denom)

    @staticmethod
    def _parts(s: Stepped) -> tuple[float, float, Any]:
        """What the step took of the gradient and of its average, both over the denominator."""
        step, product, (beta1, beta2), lr = number(s.state["step"]), number(s.state["mu_product"]), s.betas, s.get("lr")
        mu, following = (beta1 * (1 - 0.5 * 0.96 ** (t * s.get("momentum_decay"))) for t in (step, step + 1))
        denom = s.state["exp_avg_sq"].div(1 - beta2**step).sqrt().add_(s.get("eps"))
        return lr * (1 - mu) / (1 - product), lr * following / (1 - product * following), wide(denom)


class AdamaxRule(Rule):
    name = "Adamax"

    def no_plain(self, settings: Settings) -> str:
        return "its second state is a maximum, and max() forgets what it was of"


class RMSpropRule(Rule):
    name = "RMSprop"

    def no_plain(self, settings: Settings) -> str:
        alpha, momentum = number(settings["alpha"]), number(settings["momentum"])
        return ill(f"alpha={alpha:g}", alpha) or (ill(f"momentum={momentum:g}", momentum) if momentum > 0 else "")

    def weakest(self, s: Stepped) -> float:
        if s.get("momentum") > 0 or s.get("weight_decay") == 0:
            return 1.0
        return smallest(1 - s.get("lr") * s.get("weight_decay") / wide(self._root(s)))

    def invert(self, s: Stepped) -> None:
        grad, root, lr, decay, alpha = (
            negated(s),
            wide(self._root(s)),
            s.get("lr"),
            s.get("weight_decay"),
            s.get("alpha"),
        )
        momentum = s.get("momentum")
        if momentum > 0:
            buf = wide(s.state["momentum_buffer"])
            s.p.copy_(wide(s.p) + buf * lr)
        else:
            s.p.copy_((wide(s.p) + wide(grad) / root * lr) / (1 - lr * decay / root))
        grad = with_decay(grad, s.p, decay)
        if momentum > 0 and "momentum_buffer" not in s.made:
            s.state["momentum_buffer"].copy_((buf - wide(grad) / root) / momentum)
        if s.settings["centered"]:
            average_back(s, "grad_avg", grad, alpha)
        square_back(s, "square_avg", grad, alpha)

    @staticmethod
    def _root(s: Stepped) -> Any:
        square = s.state["square_avg"]
        if s.settings["centered"]:
            square = square.addcmul(s.state["grad_avg"], s.state["grad_avg"], value=-1)
        return square.sqrt().add_(s.get("eps"))


class AdagradRule(Rule):
    name = "Adagrad"

    def no_plain(self, settings: Settings) -> str:
        return ""

    def weakest(self, s: Stepped) -> float:
        if s.get("weight_decay") == 0:
            return 1.0
        root, rate = self._parts(s)
        return smallest(1 - rate * s.get("weight_decay") / root)

    def invert(self, s: Stepped) -> None:
        grad, decay = negated(s), s.get("weight_decay")
        root, rate = self._parts(s)
        s.p.copy_((wide(s.p) + wide(grad) / root * rate) / (1 - rate * decay / root))
        if "sum" not in s.made:
            g = wide(with_decay(grad, s.p, decay))
            s.state["sum"].copy_((wide(s.state["sum"]) - g * g).clamp_(min=0))

    @staticmethod
    def _parts(s: Stepped) -> tuple[Any, float]:
        rate = s.get("lr") / (1 + (number(s.state["step"]) - 1) * s.get("lr_decay"))
        return wide(s.state["sum"].sqrt().add_(s.get("eps"))), rate


def smallest(divisors: Any) -> float:
    return float(divisors.abs().min().item()) if divisors.numel() else 1.0
