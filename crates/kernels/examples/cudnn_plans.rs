//! Writes the plans that cuDNN makes for attention on an H100, without one, and how much workspace they state beside what is leased:
//!
//! ```console
//! $ cudnn_plans FOLDER 2x8x2x512x64 2x8x2x512x64-packed ...
//! ```
//!
//! A shape is batch x heads x key-value heads x tokens x head width, and packed where queries, keys and values are columns of
//! one tensor.

#[cfg(feature = "cuda")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    use kernels::AttentionShape;
    use kernels::cuda::{AttentionPass, LibraryShape, cudnn_workspace_bytes, plan_on_paper};
    let mut words = std::env::args().skip(1);
    let folder = words.next().ok_or("the first argument is a folder")?;
    for word in words {
        let packed = word.strip_suffix("-packed");
        let sizes = packed.unwrap_or(&word).split('x').map(str::parse);
        let sizes: Result<Vec<usize>, _> = sizes.collect();
        let [batch, heads, kv_heads, seq, head_dim] = sizes?[..] else {
            return Err(
                format!("`{word}` is no shape: write BxHxKVxSxD or BxHxKVxSxD-packed").into(),
            );
        };
        let sizes = AttentionShape::new([batch, seq], [heads, kv_heads], head_dim);
        let shape = match packed {
            Some(_) => LibraryShape::packed(sizes),
            None => LibraryShape::apart(sizes),
        };
        for (name, pass) in [
            ("forward", AttentionPass::Forward),
            ("backward", AttentionPass::Backward),
        ] {
            let plan = plan_on_paper(shape, pass)?;
            let (stated, leased) = (plan.workspace_bytes, cudnn_workspace_bytes(sizes, pass));
            println!("{word} {name} {stated} {leased}");
            std::fs::write(format!("{folder}/{word}-{name}.plan"), plan.written)?;
        }
    }
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn main() {
    eprintln!("cudnn_plans needs the feature `cuda`");
    std::process::exit(2);
}
