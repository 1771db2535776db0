"""What several defences are built from. No defence is registered here."""
