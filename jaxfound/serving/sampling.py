"""How a request's tokens are drawn, in the words of the API."""

from dataclasses import dataclass

from jaxfound.config.schema import ConfigError

# Ids whose logits one request can shift; what OpenAI's own servers allow.
MAX_BIASES = 300


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: logits are biased, penalised, divided, filtered, and then drawn from.

    Attributes:
        temperature: divides the logits; 0 = the most likely token.
        top_k: only the k most likely tokens, and those as likely as the k-th; 0 = all.
        top_p: of those, only the smallest set of tokens whose probabilities reach this sum
            (Holtzman et al., 2020); 1 = all.
        min_p: only tokens at least this times as likely as the most likely one (Nguyen et al.,
            2024); 0 = all.
        repetition_penalty: divides positive and multiplies negative logits of tokens that the
            prompt or the continuation holds (Keskar et al., 2019); 1 = none.
        presence_penalty: is taken from the logits of tokens that the continuation holds.
        frequency_penalty: is taken from them once for each time that it holds them.
        logit_bias: ids and what is added to their logits.
        seed: of the draws. Draw i of a request depends on its seed, i and the logits alone. None =
            another one for each request.

    Raises:
        ConfigError: a value is out of its range.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        # Written so that NaN, for which every comparison is false, is out of range.
        for name, inside, rule in (
            ("temperature", 0 <= self.temperature < float("inf"), "0 or more, and finite"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty <= 100, "above 0, at most 100"),
            ("presence_penalty", -100 <= self.presence_penalty <= 100, "from -100 to 100"),
            ("frequency_penalty", -100 <= self.frequency_penalty <= 100, "from -100 to 100"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "of 64 bits, or None"),
        ):
            if not inside:
                raise ConfigError(f"{name}={getattr(self, name)} must be {rule}")
        self._check_biases()

    def _check_biases(self) -> None:
        if len(self.logit_bias) > MAX_BIASES:
            raise ConfigError(
                f"logit_bias has {len(self.logit_bias)} ids; it must have at most {MAX_BIASES}"
            )
        ids = [token for token, _ in self.logit_bias]
        if len(set(ids)) < len(ids) or min(ids, default=0) < 0:
            raise ConfigError(f"logit_bias={self.logit_bias} must name each id once, from 0 on")
        for token, bias in self.logit_bias:
            if not -1000 <= bias <= 1000:
                raise ConfigError(
                    f"logit_bias of id {token} is {bias}; it must be from -1000 to 1000"
                )

    @property
    def penalises(self) -> bool:
        """Whether earlier tokens change what is drawn."""
        penalties = (self.presence_penalty, self.frequency_penalty)
        return self.repetition_penalty != 1 or any(penalties)

    @property
    def filters(self) -> bool:
        """Whether tokens have to be put in order of their probability."""
        return self.top_k > 0 or self.top_p < 1
