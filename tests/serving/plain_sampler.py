"""The sampler's meaning in plain numpy, float64, one row at a time."""

import numpy as np


def adjusted(logits, prompt, drawn, how):
    """Logits after biases and penalties."""
    found = np.array(logits, np.float64)
    for token, bias in how.logit_bias:
        found[token] += bias
    for token in {*map(int, prompt), *map(int, drawn)}:
        if found[token] > 0:
            found[token] /= how.repetition_penalty
        else:
            found[token] *= how.repetition_penalty
    for token in set(map(int, drawn)):
        times = sum(int(one) == token for one in drawn)
        found[token] -= how.presence_penalty + how.frequency_penalty * times
    return found


def kept(scaled, how):
    """Ids that top-k and then top-p leave, of logits that were divided by the temperature."""
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if how.top_k:
        weakest = scaled[order[min(how.top_k, len(order)) - 1]]
        order = [i for i in order if scaled[i] >= weakest]
    weights = np.exp(np.array([scaled[i] for i in order], np.float64) - scaled[order[0]])
    found, total = set(), 0.0
    for i, weight in zip(order, weights / weights.sum(), strict=True):
        if total < how.top_p or how.top_p == 1:
            found.add(i)
        total += weight
    return found


def probabilities(logits, prompt, drawn, how):
    """The distribution of the next token."""
    found = adjusted(logits, prompt, drawn, how)
    result = np.zeros(len(found))
    if how.temperature == 0:
        result[found.argmax()] = 1.0
        return result
    scaled = found / how.temperature
    best = scaled.max()
    for i in kept(scaled, how):
        if np.exp(scaled[i] - best) >= how.min_p:
            result[i] = np.exp(scaled[i] - best)
    return result / result.sum()
