"""How maps are made. Tensors only: no model, no tokenizer, no Hugging Face."""
