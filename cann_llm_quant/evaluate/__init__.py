"""How well a model predicts a text, and how far it is from another one: logits in, numbers out."""
