"""The draft's side of a call: from committed tokens and features to a tree."""
