document.addEventListener("input", (event) => {
  const slider = event.target;
  if (slider.matches(".compare input")) slider.closest(".compare").style.setProperty("--at", slider.value + "%");
});
