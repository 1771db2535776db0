"""code_mean: answers each code with the mean of the attacker's own images that have it. For channels that send finite codes.

    x^(c) = sum_j n_j exp(-|c - j| / h) m_j / sum_j n_j exp(-|c - j| / h)

    c, j       codes: what was seen, and those of the attacker's images      [k] numbers each
    n_j, m_j   how many of its images have code j, and their mean            [codes], [codes, c, h, w]
    |c - j|    the sum of the differences of their numbers, in units of the smallest that there is between two codes
    h          how far neighbouring codes help, chosen by the leave-one-out error on the attacker's own images

With h = 0, x^ is the mean of the images that have the code. If an image always gives the same code, and there are enough images,
this mean minimises the squared error: no attack that sees only the code does better. If few images have a code, its mean is
uncertain, and neighbouring codes help. A code that none of the images has is answered by its nearest ones.

h is chosen by leaving each image i out of its own code. That makes the difference x_i - x^ larger by the factor N / (N - 1), with
N = sum_j n_j exp(-|c - j| / h), so no second pass over the images is needed:

    |x_i - x^_without i|^2 = (N / (N - 1))^2 |x_i - x^(c)|^2

Nothing is trained, and more releases of the same code tell nothing more. Known failure: if every image has a code of its own,
each code is seen once only. Then this attack is a kernel regression, and `ridge` and `decoder` are better.
"""

import torch
from torch import Tensor

from splitveil.attacks import Attack, AttackConfig
from splitveil.attacks.shared.inverse_network import CHUNK
from splitveil.attacks.threat import Access, Observation, ThreatModel
from splitveil.defences.finite_code import MOST_CODES
from splitveil.registry import ATTACKS, UserError

REACHES = (0.05, 0.15, 0.25, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 4.0, 8.0, 16.0, 32.0, 1e6)
"""Candidates for h: with the first a neighbour counts 2e-9 of an own image, with the last all images count alike."""


def code_logits(distances: Tensor, count: Tensor, reach: float) -> Tensor:
    """Softmax of this is the share of each own code in an answer: [b, codes] distances, [codes] images -> [b, codes]."""
    return count.log() - distances / reach


def left_out_error(distances: Tensor, count: Tensor, means: Tensor, squares: Tensor, reach: float) -> float:
    """The squared error, over all own images, of answering each as if it were not there; `squares` [codes] are sums |x|^2."""
    alone = torch.diag(count == 1)  # a code's only image leaves its neighbours
    share = code_logits(distances, count, reach).masked_fill(alone, -torch.inf).softmax(1)  # [codes, codes]
    answer = share @ means
    error = squares - 2 * count * (means * answer).sum(1) + count * answer.square().sum(1)  # [codes]: sum |x_i - x^|^2
    own = share.diagonal() / count  # 1 / N: the share of one image in the answer
    return float((error / (1 - own).square()).sum())


@ATTACKS.register("code_mean", AttackConfig)
class CodeMean(Attack[AttackConfig]):
    """The mean of the attacker's images that have the same code; with enough of them nothing does better."""

    needs_codes = True
    requires = ThreatModel(channel=False)

    def fit(self, access: Access) -> "CodeMean":
        assert access.query is not None and access.auxiliary is not None
        sent, images = [], access.auxiliary
        for x, _ in images.in_order(CHUNK):
            sent.append(access.query(x)[:, 0].flatten(1).double())
            self.on_progress(min(CHUNK * len(sent), len(images)), len(images))
        self.codes_, which = torch.cat(sent).unique(dim=0, return_inverse=True)  # [codes, k], [n]
        if len(self.codes_) > MOST_CODES:
            raise UserError(
                f"code_mean: the attacker's images have {len(self.codes_)} different codes, at most {MOST_CODES} can be counted "
                "out; attack with decoder or ridge"
            )
        self.count_ = which.bincount().double()
        total = torch.zeros(len(self.codes_), images.images[0].numel(), dtype=torch.float64, device=which.device)
        squares = torch.zeros_like(self.count_)
        for (x, _), code in zip(images.in_order(CHUNK), which.split(CHUNK)):
            pixels = x.flatten(1).double()
            total.index_add_(0, code, pixels)
            squares.index_add_(0, code, pixels.square().sum(1))
        self.means_ = total / self.count_.unsqueeze(1)
        between = torch.cdist(self.codes_, self.codes_, p=1)
        apart = between[between > 0]
        self.unit_ = apart.min() if len(apart) else between.new_ones(())  # one code: any unit will do
        errors = {reach: left_out_error(between / self.unit_, self.count_, self.means_, squares, reach) for reach in REACHES}
        self.reach_ = min(errors, key=lambda reach: errors[reach])
        self.facts_ = {"codes_seen": len(self.codes_), "reach": self.reach_}
        self.shape_ = access.x_shape
        return self

    def reconstruct(self, observation: Observation) -> Tensor:
        answers = []
        for sent in observation.z.split(CHUNK):
            distances = torch.cdist(sent[:, 0].flatten(1).double(), self.codes_, p=1) / self.unit_
            answers.append(code_logits(distances, self.count_, self.reach_).softmax(1) @ self.means_)
        return torch.cat(answers).float().clamp(0, 1).view(-1, *self.shape_)
