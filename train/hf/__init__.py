"""Model folders of Hugging Face's transformers: config, weights and tokenizer.

In: a folder, or the tensors of a checkpoint. Out: settings and weights of a model, or a folder.
Imports: config, text, data, model, engine.
"""
