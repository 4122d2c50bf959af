"""Publishing models on the Hugging Face Hub; `weights/hub.py` downloads them."""
