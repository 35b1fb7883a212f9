"""Weights of one Tsallis or Shannon row in sixty digits, nothing shared with the library.

The threshold may lie closer to a score than any float can say, so it is searched twice: first as a
number, then as the logarithm of its distance from the nearest score.
"""

import mpmath as mp

DIGITS = 60


def weights(scores, log_mass, alpha, temperature):
    """A list of mpf. scores, log_mass: lists of floats; -inf in either hides a key."""
    with mp.workdps(DIGITS):
        keys = [
            (i, mp.mpf(s), mp.mpf(m))
            for i, (s, m) in enumerate(zip(scores, log_mass, strict=True))
            if s > -mp.inf and m > -mp.inf
        ]
        answer = [mp.mpf(0)] * len(scores)
        if not keys:
            return answer
        solve = _softmax if alpha == 1 else _sparse
        for (i, _, _), weight in zip(
            keys, solve(keys, mp.mpf(alpha), mp.mpf(temperature)), strict=True
        ):
            answer[i] = weight
        return answer


def _softmax(keys, _, temperature):
    logits = [s / temperature + m for _, s, m in keys]
    peak = max(logits)
    terms = [mp.e ** (x - peak) for x in logits]
    return [term / sum(terms) for term in terms]


def _sparse(keys, alpha, temperature):
    eps = alpha - 1

    def weigh(centre, distance):
        """With the threshold at centre + distance."""
        above = [(s - centre) - distance for _, s, _ in keys]
        return [
            mp.e ** (m + mp.log(eps * y / temperature) / eps) if y > 0 else mp.mpf(0)
            for y, (_, _, m) in zip(above, keys, strict=True)
        ]

    rooms = [temperature / eps * mp.e ** (-eps * m) for _, _, m in keys]
    low = max(s - room for (_, s, _), room in zip(keys, rooms, strict=True))
    high = max(s for _, s, _ in keys)
    rough = _bisect(lambda t: sum(weigh(t, 0)) >= 1, low, high, 400)
    centre = min((s for _, s, _ in keys), key=lambda s: abs(s - rough))
    side = 1 if sum(weigh(centre, mp.mpf(0))) >= 1 else -1
    spread = high - min(s for _, s, _ in keys)
    most = mp.log(1000 * abs(rough - centre) + spread + max(rooms))

    def is_left(log_distance):
        full = sum(weigh(centre, side * mp.e**log_distance)) >= 1
        return full if side > 0 else not full

    return weigh(centre, side * mp.e ** _bisect(is_left, mp.mpf(-(10**11)), most, 260))


def _bisect(is_left, low, high, steps):
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if is_left(middle) else (low, middle)
    return (low + high) / 2
