"""What several attacks are built from. No attack is registered here."""
