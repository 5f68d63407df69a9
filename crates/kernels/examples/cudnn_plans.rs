//! Writes the plans that cuDNN makes for attention on an H100, without one, and how much workspace they state beside what is leased:
//!
//! ```console
//! $ cudnn_plans FOLDER 2x8x2x512x64 2x8x2x512x64-packed 2x8x2x512x64-ragged6 ...
//! ```
//!
//! A shape is batch x heads x key-value heads x tokens x head width, packed where queries, keys and values are columns of
//! one tensor, and ragged where there is room for so many documents.

#[cfg(feature = "cuda")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    use kernels::AttentionShape;
    use kernels::cuda::{AttentionPass, LibraryShape, cudnn_workspace_bytes, plan_on_paper};
    let mut words = std::env::args().skip(1);
    let folder = words.next().ok_or("the first argument is a folder")?;
    for word in words {
        let (numbers, kind) = word.split_once('-').unwrap_or((&word, ""));
        let numbers: Result<Vec<usize>, _> = numbers.split('x').map(str::parse).collect();
        let [batch, heads, kv_heads, seq, head_dim] = numbers?[..] else {
            return Err(format!("`{word}` is no shape: write BxHxKVxSxD").into());
        };
        let sizes = AttentionShape::new([batch, seq], [heads, kv_heads], head_dim);
        let shape = match (kind, kind.strip_prefix("ragged").map(str::parse)) {
            ("", _) => LibraryShape::apart(sizes),
            ("packed", _) => LibraryShape::packed(sizes),
            (_, Some(documents)) => LibraryShape {
                documents: Some(documents?),
                ..LibraryShape::of_documents(sizes)
            },
            _ => return Err(format!("`{word}` ends in neither -packed nor -raggedN").into()),
        };
        for (name, pass) in [
            ("forward", AttentionPass::Forward),
            ("backward", AttentionPass::Backward),
        ] {
            let plan = plan_on_paper(shape, pass)?;
            let (stated, leased) = (plan.workspace_bytes, cudnn_workspace_bytes(shape, pass));
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
