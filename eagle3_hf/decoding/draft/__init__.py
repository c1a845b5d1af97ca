"""The draft's side of a call: from features of committed tokens to a tree."""
