"""What every draft tree promises, checked the slow way."""

import torch

from eagle3_hf import DraftTree


def assert_valid(tree: DraftTree) -> None:
    """Every promise of `DraftTree`: shapes, dtypes, parents before children, siblings that differ."""
    shape = tuple(tree.tokens.shape)
    for name in ("parents", "scores", "log_probs"):
        assert tuple(getattr(tree, name).shape) == shape, f"{name} must have the shape of tokens"
    assert tuple(tree.num_nodes.shape) == shape[:1], "num_nodes must have shape (B,)"
    for name in ("tokens", "parents", "num_nodes"):
        assert getattr(tree, name).dtype == torch.int64, f"{name} must be int64"
    for name in ("scores", "log_probs"):
        assert getattr(tree, name).dtype == torch.float32, f"{name} must be float32"
    for index, (count, parents) in enumerate(zip(tree.num_nodes.tolist(), tree.parents.tolist(), strict=True)):
        assert 1 <= count <= shape[1], f"tree {index} claims {count} nodes"
        assert parents[0] == -1, f"the root's parent must be -1 in tree {index}"
        for node in range(1, shape[1]):
            allowed = range(node) if node < count else (0,)
            assert parents[node] in allowed, f"the parent of node {node} of tree {index} must be in {allowed}"
        tokens, own = tree.host()[index]
        children = list(zip(own[1:], tokens[1:], strict=True))
        assert len(set(children)) == len(children), f"siblings of tree {index} carry the same token"
