"""What several surrogates are built from. No surrogate is registered here."""
